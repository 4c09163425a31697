"""Command lines of small pretrainings, for tests that start some."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.corpus.indexed import IndexedWriter
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
    """Flags of a run; True is a flag without a value, None leaves a flag out."""
    return flags({"data_path": tokens, "save": save, **OPTIONS, **options})


def flags(options: dict[str, Any]) -> list[str]:
    """Options as a command line has them."""
    found: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        found += [] if value is None else ["--" + name.replace("_", "-"), *map(str, values)]
    return found


SMALL: dict[str, Any] = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1000,
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 6,
    "lr": 0.01,
    "num_threads": 1,
}
"""Of trainings in this process."""


def settled_pair(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Token files old enough that their digests are remembered."""
    found = write_pair(prefix, lengths, first)
    for ending in (".bin", ".idx"):
        os.utime(found + ending, (1e9, 1e9))
    return found


def write_documents(prefix: Path, documents: Iterable[list[int]]) -> str:
    """Token files of documents of one sequence each."""
    with open(f"{prefix}.bin", "wb") as data, open(f"{prefix}.idx", "wb") as index:
        writer = IndexedWriter(data, np.uint16)
        for document in documents:
            writer.add_document([document])
        writer.write_index(index)
    return str(prefix)


@dataclass(frozen=True, slots=True)
class Pretrain:
    """Runs stages.pretrain on the token files of a module; the fixture `pretrain`."""

    zygote: Zygote
    tokens: str

    def __call__(self, save: Path, *words: str, expect: int = 0, **options: Any) -> str:
        """The log of a run that ends with status `expect`."""
        given = [*arguments(self.tokens, save, **options), *words]
        status, _, log = self.zygote.run("stages.pretrain", given)
        assert status == expect, log
        return log


def manifest(folder: Path) -> Manifest:
    """Of a finished run."""
    found = read_manifest(str(folder / "manifest.json"))
    assert found is not None, f"{folder} has no manifest"
    return found[0]


def ledger(folder: Path) -> list[dict[str, Any]]:
    """Of a finished run, line by line."""
    return parse_ledger((folder / "ledger.jsonl").read_bytes())
