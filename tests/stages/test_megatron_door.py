"""`python -m stages.megatron`: commands of Megatron-LM's scripts and of guides, as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stages.directly import Done, run_program
from tests.stages.megatron_answers import ANSWERS, RUNS
from tests.test_docs import ROOT
from tests.trainyard.retrieval.projects import make_project
from tests.vectors import GOLDEN
from trainyard.config_text import parse_document

TEXT = (GOLDEN / "megatron_commands.jsonl").read_text()
LINES: list[dict[str, Any]] = [json.loads(line) for line in TEXT.splitlines()]
NAMES = [Path(line["script"]).name for line in LINES]


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what a command sets is taken back
        monkeypatch.delenv(name)


def door(program: str, *words: str) -> Done:
    return run_program("stages.megatron", program, *words)


def test_the_lines_are_those_of_the_reference(shared: Path) -> None:
    assert (shared / "reference/megatron_commands.jsonl").read_text() == TEXT


def test_every_line_is_in_the_table_and_nothing_else() -> None:
    assert set(NAMES) == set(ANSWERS)


@pytest.mark.parametrize(("name", "line"), list(zip(NAMES, LINES, strict=True)), ids=NAMES)
def test_a_line_is_answered_as_the_table_says(name: str, line: dict[str, Any]) -> None:
    done = door(line["program"], *line["argv"], "--dry-run")
    expected = ANSWERS[name]
    last = done.err.splitlines()[-1] if done.err else ""
    if expected == RUNS:
        assert done.status == 0, last
        return
    assert expected in last
    assert done.status == (1 if "is missing" in expected else 2)
    assert "Traceback" not in done.err


def test_a_run_is_told_what_the_name_stands_for() -> None:
    line = next(line for line in LINES if line["script"] == "examples/pretrain_t5.sh")
    done = door(f"/m/{line['program']}", *line["argv"], "--dry-run")
    assert "--model-type t5 --tokenizer-type BertWordPieceLowerCase" in done.err
    assert 'model_type = "t5"' in done.out
    assert 'tokenizer_type = "BertWordPieceLowerCase"' in done.out


def test_the_hybrid_of_the_script_is_the_published_kind() -> None:
    line = next(line for line in LINES if line["program"] == "pretrain_mamba.py")
    done = door(line["program"], *line["argv"], "--dry-run")
    assert done.status == 0, done.err
    read = parse_document(done.out, ".toml", "dry run")
    assert (read["model_type"], read["hybrid_attention_ratio"]) == ("mamba", 0.08)
    newer = door("pretrain_hybrid.py", *_with_pattern(line["argv"]), "--dry-run")
    assert newer.status == 0, newer.err
    read = parse_document(newer.out, ".toml", "dry run")
    assert (read["hybrid_layer_pattern"], read["num_layers"]) == ("MM*-", 4)


def _with_pattern(words: list[str]) -> list[str]:
    """The command with a pattern in place of a number of layers and ratios."""
    kept = list(words)
    for flag in ("--num-layers", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"):
        at = kept.index(flag)
        del kept[at : at + 2]
    return [*kept, "--hybrid-layer-pattern", "MM*-"]


def test_help_is_the_table_and_is_quick() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "stages.megatron", "--help"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert time.monotonic() - began < 5  # half a second on an idle machine
    assert "pretrain_gpt.py" in done.stdout
    assert "models of images come later" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "numpy", "tyro", "stages.pretrain.config"} & imported


def test_a_retro_project_brings_its_options_of_data(tmp_path: Path) -> None:
    made = make_project(tmp_path)
    line = next(line for line in LINES if line["program"] == "pretrain_retro.py")
    folder = str(made.project.url)
    words = [folder if word == "/x" else word for word in line["argv"]]
    few = ("--lr-decay-samples", "24", "--lr-warmup-samples", "4", "--save", str(tmp_path / "run"))
    done = door(line["program"], *words, *few, "--dry-run")
    assert done.status == 0, done.err
    read = parse_document(done.out, ".toml", "dry run")
    config = made.project.config
    assert read["seq_length"] == config.retro_gpt_seq_length
    assert read["train_samples"] == config.retro_gpt_train_samples
    assert read["eval_iters"] == config.retro_gpt_eval_iters  # not the line's 10
    assert read["split"] == "98,2,0"  # the line's
    assert read["model_type"] == "retro"
