"""What every step did, one JSON line each, without times: equal ledgers are equal runs.

    {"step": 1, "consumed_train_samples": 8, "tokens": 1024, "global_batch_size": 8, "lm_loss": 9.1,
     "learning_rate": 0.0, "weight_decay": 0.01, "grad_norm": 1.5, "samples": "1f0c...",
     "rng": "9be2...", "validation_loss": 9.0}

`tokens` and `consumed_train_samples` count from the beginning of the run. `samples` digests which
samples the step took, in order, over all ranks: each rank held the ids that its own batches carried
against its part of what is digested, before anything was updated (`taken`). It tells which samples
they were, not that their tokens came unharmed. `rng` digests the seeds of the step's micro-batches:
each rank asked its generators, of the CPU and of its CUDA device, what they were seeded with when
the forward pass of each chunk began, and held it against those. What is drawn from there on follows
from that state; dropout on the residual stream hashes the same seeds without a generator. It tells
neither how many numbers were drawn nor what a model of one's own seeds by itself. In fp16
`loss_scale` is the one of the step, and `skipped` says that a gradient overflowed and nothing was
updated; `passed_over` says so of a step of --iterations-to-skip. `num_zeros` and `params_norm` are
there when they were asked for. `validation_loss` is there when it was measured after that step; a
line of step 0 holds nothing else. With several validation sets it is their mean, and
`validation_losses` has each by name. The last line has `test_loss` and `test_losses` likewise,
where there is test data. Floats are written so that they read back to the same
bits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts.digest import digest_bytes

FILE = "ledger.jsonl"


@dataclass(slots=True)
class StepRecord:
    """One step of a run."""

    step: int
    consumed_train_samples: int
    tokens: int
    global_batch_size: int | None = None
    lm_loss: float | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    grad_norm: float | None = None
    samples: str | None = None
    rng: str | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    passed_over: bool | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    validation_loss: float | None = None
    validation_losses: dict[str, float] | None = None
    test_loss: float | None = None
    test_losses: dict[str, float] | None = None

    def set_validation(self, losses: dict[str, float]) -> None:
        """Enter the loss of each validation set, by name."""
        self.validation_loss = sum(losses.values()) / len(losses)
        self.validation_losses = losses if len(losses) > 1 else None

    def set_test(self, losses: dict[str, float]) -> None:
        """Enter the loss of each test set, by name; nothing where there is none."""
        if losses:
            self.test_loss = sum(losses.values()) / len(losses)
            self.test_losses = losses if len(losses) > 1 else None

    def document(self) -> dict[str, Any]:
        """The fields, without what was not measured."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}

    def line(self) -> str:
        """The JSON line."""
        return json.dumps(self.document(), allow_nan=False)


@dataclass(slots=True)
class Ledger:
    """The lines since the last checkpoint that stays, and the digest of all of them."""

    digest: str = ""
    lines: list[str] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        """Enter a step."""
        line = record.line()
        self.lines.append(line)
        self.digest = digest_bytes(f"{self.digest}\n{line}".encode())

    def text(self) -> bytes:
        """The lines as a file."""
        return "".join(line + "\n" for line in self.lines).encode()

    def forget(self) -> None:
        """Drop the lines, now that a checkpoint that stays holds them."""
        self.lines = []


def digest_samples(ids: NDArray[np.int64]) -> str:
    """Digest of (n, 2) sample ids in the order in which a step served them; 16 digits tell runs
    apart."""
    return digest_bytes(np.ascontiguousarray(ids, "<i8").tobytes())[:16]


def parse_ledger(text: bytes) -> list[dict[str, Any]]:
    """The steps of a ledger file."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def chain(lines: Iterable[str], digest: str = "") -> str:
    """The digest of a ledger that had `digest` and goes on with these lines."""
    for line in lines:
        digest = digest_bytes(f"{digest}\n{line}".encode())
    return digest
