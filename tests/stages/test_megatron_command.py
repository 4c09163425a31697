"""Commands and files of Megatron-LM, as `stages.pretrain` takes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.pretrain.config import PretrainConfig
from stages.runtime.cli import stage_main
from tests.test_docs import ROOT, fenced
from trainyard.config import differing, from_dict
from trainyard.config_text import parse_document
from trainyard.megatron_cli.yaml_cfg import read_yaml_cfg

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --save s --lr 1e-3"
GUIDE = (
    f"{MODEL} --encoder_seq_length 64 --batch-size 4 --train-steps 10 --warmup-steps 2 "
    "--gradient-clip-val 0.5 --mock-data --dataset-size 64 --vocab-size 1000 --world-size 2 "
    "--use-mcore-models --no-rope-fusion --use-rotary-position-embeddings --no-position-embedding "
    "--override-opt_param-scheduler --DDP-impl local --local_rank 0"
)

FILE = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}
training: {batch_size: 4, seq_length: 64, train_iters: 10, lr: 1.0e-3, save_interval: null}
tokenizer_type: NullTokenizer
vocab_size: 1000
mock_data: true
masked_softmax_fusion: true
save: ${RUNS}/a
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what a command sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("RUNS", "/runs")


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, line: str, expect: int = 0) -> dict[str, Any]:
        arguments = [*line.split(), "--dry-run"]
        status = stage_main("pretrain", PretrainConfig, "none", megatron=True, argv=arguments)
        printed = self._capsys.readouterr()
        self.err = printed.err
        assert status == expect, self.err
        if status:
            return {}
        config = from_dict(PretrainConfig, parse_document(printed.out, ".toml", "dry run"))
        return differing(config)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_a_command_from_a_guide_runs(command: Command) -> None:
    assert command(GUIDE) == {
        **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
        **{"save": "s", "lr": 1e-3, "micro_batch_size": 4, "train_iters": 10},
        **{"lr_warmup_iters": 2, "clip_grad": 0.5, "mock_data": True, "dataset_size": 64},
        **{"tokenizer_type": "NullTokenizer", "vocab_size": 1000, "nproc_per_node": 2},
        **{"position_embedding_type": "rope", "override_opt_param_scheduler": True},
    }
    for flags in ("--use-mcore-models", "--no-rope-fusion", "--DDP-impl", "--local_rank"):
        assert f"{flags}: ignored: " in command.err


def test_flags_override_the_yaml_file(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    read = command(f"--yaml-cfg {path}")
    assert (read["save"], read["micro_batch_size"], read["lr"]) == ("/runs/a", 4, 1e-3)
    assert "flags of the command line override the file" in command.err
    assert "masked_softmax_fusion: ignored" in command.err
    over = command(f"--yaml_cfg={path} --train-steps 7 --bf16 --save b")
    assert over == {**read, "train_iters": 7, "bf16": True, "save": "b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--yaml-cfg {path} --config {path}", "unknown key 'model'"),
        ("--yaml-cfg {path} --config {other}", "--config and --yaml-cfg each hold the options"),
        ("--yaml-cfg {path} --yaml-cfg {path}", "--yaml-cfg is given 2 times"),
        ("--yaml-cfg {path}/none", "--yaml-cfg: "),
        ("--yaml-cfg {wrong}", "wrong.yaml: num_layers must be a whole number, got 'two'"),
        ("--yaml-cfg {twice}", "lr occurs twice, in line 1 in a and in line 2"),
        ("--no-such-flag 1", "--no-such-flag is not an option"),
    ],
)
def test_conflicting_options_exit_with_2(
    command: Command, tmp_path: Path, line: str, message: str
) -> None:
    files = {"path": FILE, "other": "num_layers: 2", "wrong": "num_layers: two"}
    files["twice"] = "a: {lr: 1}\nlr: 2"
    paths = {name: tmp_path / f"{name}.yaml" for name in files}
    for name, text in files.items():
        paths[name].write_text(text)
    command(line.format(**paths), expect=2)
    assert message in command.err


def test_rank_0_reports_ignored_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"{GUIDE} --init-method tcp://host:29500"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command(line)
    assert ": ignored: " not in command.err
    monkeypatch.setenv("RANK", "0")
    command(line)
    assert ": ignored: " in command.err


HEAVY = {"torch", "numpy", "pyarrow", "s3fs", "aiohttp"}
"""What a person who asks for help would wait for."""


@pytest.mark.slow
def test_help_is_quick() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "stages.pretrain", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert "--yaml-cfg" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "stages.pretrain.config" in imported
    assert not HEAVY & imported


@pytest.mark.parametrize("text", fenced("docs/training.md", "yaml"))
def test_yaml_files_printed_in_guides_are_read(text: str) -> None:
    document, _ = read_yaml_cfg(text, PretrainConfig, {"HOME": "/home"}, "printed")
    assert from_dict(PretrainConfig, document).training.micro_batch_size == 4
