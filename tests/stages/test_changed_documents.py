"""Stages refuse a document of a checkpoint that differs from its manifest, and write nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stages.directly import run_program
from tests.stages.pretrain_runs import arguments
from tests.stages.test_reshard import UNTIED
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt

pytestmark = pytest.mark.slow

LLAMA = replace(UNTIED, hidden_size=32, seq_length=64)
DEEP = b"[" * 100_000 + b"]" * 100_000
LAYERS = b'"num_layers": 2'

SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "changed": lambda data: data.replace(LAYERS, b'"num_layers": 3'),
    "cut short": lambda data: data[:-20],
    "grown": lambda data: data + b"\n",
    "nested": lambda data: DEEP,
    "a billion layers": lambda data: data.replace(LAYERS, b'"num_layers": 1000000000'),
}

EVALUATED = ("--task", "WIKITEXT103", "--valid-data", "TEXT")

READERS: dict[str, tuple[str, ...]] = {
    "reshard": ("--load-dir", "STEP", "--save-dir", "OUT"),
    "reshard to hf": ("--load-dir", "STEP", "--save-dir", "OUT", "--saver", "hf"),
    "reshard to core": ("--load-dir", "STEP", "--save-dir", "OUT", "--saver", "core"),
    "reshard to torch_dist": ("--load-dir", "STEP", "--save-dir", "OUT", "--saver", "torch_dist"),
    "evaluate": ("--load", "STEP", *EVALUATED, "--output-dir", "OUT"),
    "benchmark": ("--load", "STEP", "--prompts", "a", "--output-dir", "OUT"),
    "inspect": ("STEP",),
    "inspect unverified": ("STEP", "--verify-checkpoint", "none"),
    "inspect by digests": ("STEP", "--verify-checkpoint", "digests"),
    "inspect another": ("SOUND", "--diff", "STEP"),
}


HANDED_ON = (
    "state.json",
    "index.json",
    "ledger.jsonl",
    "rng-00001-of-00001.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/trainyard_tokenizer.json",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    save_gpt(str(folder), random_gpt(LLAMA))
    (folder.parent / "text").write_text("the yard\n")
    return folder


def spoil(file: Path, how: str) -> None:
    data = SPOILED[how](file.read_bytes())
    assert data != file.read_bytes()
    file.write_bytes(data)


def check_refused(words: list[str], named: str, out: Path) -> None:
    done = run_program(*words, expect=1)
    assert named in done.err
    assert "Traceback" not in done.err
    assert not out.exists()


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("reader", READERS)
def test_changed_config_is_refused(sound: Path, tmp_path: Path, reader: str, how: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(sound, run)
    spoil(run / "iter_0000050" / "config.json", how)
    places = {"STEP": run, "OUT": out, "SOUND": sound, "TEXT": sound.parent / "text"}
    words = [str(places.get(word, word)) for word in READERS[reader]]
    check_refused([f"stages.{reader.split()[0]}", *words], "config.json: ", out)


@pytest.mark.parametrize("name", HANDED_ON)
@pytest.mark.parametrize("saver", ["trainyard", "hf"])
def test_changed_file_is_not_copied(sound: Path, tmp_path: Path, name: str, saver: str) -> None:
    if saver == "hf" and name in ("ledger.jsonl", "rng-00001-of-00001.safetensors"):
        pytest.skip("this format has no place for it")
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(sound, run)
    file = run / "iter_0000050" / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    words = ["--load-dir", str(run), "--save-dir", str(out), "--saver", saver]
    check_refused(["stages.reshard", *words], f"{name}: ", out)


@pytest.mark.parametrize("reader", ["reshard to hf", "evaluate", "benchmark"])
def test_unlisted_tokenizer_file_is_refused(sound: Path, tmp_path: Path, reader: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(sound, run)
    (run / "iter_0000050" / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    places = {"STEP": run, "OUT": out, "TEXT": sound.parent / "text"}
    words = [str(places.get(word, word)) for word in READERS[reader]]
    check_refused([f"stages.{reader.split()[0]}", *words], "tokenizer/chat_template.jinja: ", out)


# --- of a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("reader", ["certify", "blame", "report", "verify", "pretrain", "convert"])
def test_stages_that_read_a_run_refuse_a_changed_document(
    finished: Path, tokens: str, tmp_path: Path, reader: str, how: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(finished, run)
    step = run / "iter_0000008"
    spoil(step / "config.json", how)
    words = arguments(tokens, out, load=run)
    convert = {"load": run, "ckpt_convert_format": "torch", "ckpt_convert_save": out}
    given = {
        "certify": [str(run)],
        "blame": ["--load", str(run), "--step", "2", "--data-path", tokens],
        "report": ["--checkpoint", str(run), "--output-prefix", str(out / "card")],
        "verify": [str(run)],
        "pretrain": [*words, "--finetune"],
        "convert": arguments(tokens, tmp_path / "other", **convert),
    }[reader]
    module = "stages.pretrain" if reader == "convert" else f"stages.{reader}"
    check_refused([module, *given], "config.json: ", out)
