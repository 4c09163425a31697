"""Command lines of small pretrainings, for tests that start some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.testing.kill import Zygote
from trainyard.training.loop.ledger import parse_ledger

OPTIONS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1001,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 8,
    "save_interval": 3,
    "eval_interval": 4,
    "eval_iters": 1,
    "lr": 0.01,
    "split": "90,10,0",
    "num_threads": 1,
}


def arguments(tokens: str, save: Path, **options: Any) -> list[str]:
    """Flags of a run; True stands for a flag without a value."""
    flags = ["--data-path", tokens, "--save", str(save)]
    for name, value in {**OPTIONS, **options}.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def finished_run(zygote: Zygote, tokens: str, folder: Path) -> Path:
    """A run without a stop, in a folder that is not there yet: checkpoints 3, 6 and 8."""
    status, _, log = zygote.run("stages.pretrain", arguments(tokens, folder))
    assert status == 0, log
    return folder


def manifest(folder: Path) -> Manifest:
    """Of a finished run."""
    found = read_manifest(str(folder / "manifest.json"))
    assert found is not None, f"{folder} has no manifest"
    return found[0]


def ledger(folder: Path) -> list[dict[str, Any]]:
    """Of a finished run, line by line."""
    return parse_ledger((folder / "ledger.jsonl").read_bytes())
