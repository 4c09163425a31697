"""The ledger: one JSON line for every step, without times. Equal ledgers are equal runs.

    {"step": 1, "consumed_train_samples": 8, "tokens": 1024, "global_batch_size": 8, "lm_loss": 9.1,
     "learning_rate": 0.0, "weight_decay": 0.01, "grad_norm": 1.5, "samples": "1f0c...",
     "rng": "9be2...", "validation_loss": 9.0}

- `tokens`, `consumed_train_samples`: since the start of the run.
- `samples`: digest of the ids of the step's samples, in order, over all ranks. Before the update,
  each rank compares the ids in its own batches with its part (sample_check.py). The digest does not
  cover the tokens of the samples.
- `rng`: digest of the seeds of the step's micro-batches: of their number, the first and the last.
  Each rank compares its own with the seeds of its CPU and CUDA generators, at the start of each
  forward pass. The digest covers neither how many numbers are drawn, nor generators that a user's
  model seeds itself. Earlier versions digested every seed (seeds.py).
- `loss_scale`: of the step, in fp16. `skipped`: a gradient overflowed, so there was no update.
  `passed_over`: a step of --iterations-to-skip.
- `num_zeros`, `params_norm`: on request.
- `more_losses`: of a model with losses beside that of the tokens, by name, such as `sop loss`;
  `more_validation_losses` and `more_test_losses` likewise, means over the sets.
- `layer_figures`: of a model whose layers count something, by name, such as `max expert load`: the
  tokens of the busiest expert of all layers as a multiple of an even share. `layer_loads`, in the
  last line: the share of the choices that fell on each expert, by layer. `layer_drops`, with a
  capacity: the share of each expert's choices that were beyond it.
- `course`: in the first step after a change of options: `options`, those that changed, and
  `schedule`, the new rates, as in state.json, if they changed.
- `validation_loss`: measured after the step; the mean of several sets, with each by name in
  `validation_losses`. A line of step 0 has nothing else. `test_loss` and `test_losses` likewise, in
  the last line.

Rank 0 writes the ledger. The records of other ranks have no `samples`.

Floats are written so that they read back to the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard import json_text
from trainyard.artifacts.digest import digest_bytes

FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class EvaluationLosses:
    """The losses of a validation or test set, equal on all ranks."""

    loss: float
    """Mean over its tokens."""
    more_losses: Mapping[str, float] = field(default_factory=dict)
    """Losses beside that of the tokens, by name."""


@dataclass(slots=True)
class StepRecord:
    """One step of a run."""

    step: int
    consumed_train_samples: int
    tokens: int
    global_batch_size: int | None = None
    lm_loss: float | None = None
    more_losses: dict[str, float] | None = None
    layer_figures: dict[str, float] | None = None
    layer_loads: dict[str, list[float]] | None = None
    layer_drops: dict[str, list[float]] | None = None
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
    course: dict[str, Any] | None = None
    validation_loss: float | None = None
    validation_losses: dict[str, float] | None = None
    more_validation_losses: dict[str, float] | None = None
    test_loss: float | None = None
    test_losses: dict[str, float] | None = None
    more_test_losses: dict[str, float] | None = None

    def set_validation(self, losses: Mapping[str, EvaluationLosses]) -> None:
        """Enter the losses of each validation set, by name."""
        self.validation_loss, self.validation_losses, self.more_validation_losses = _means(losses)

    def set_test(self, losses: Mapping[str, EvaluationLosses]) -> None:
        """Enter the losses of each test set, by name, if there are any."""
        if losses:
            self.test_loss, self.test_losses, self.more_test_losses = _means(losses)

    def document(self) -> dict[str, Any]:
        """The fields that have a value."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}

    def line(self) -> str:
        """The JSON line."""
        return json.dumps(self.document(), allow_nan=False)


def _means(
    sets: Mapping[str, EvaluationLosses],
) -> tuple[float, dict[str, float] | None, dict[str, float] | None]:
    """Mean loss, that of each of several sets, and the means of further losses."""
    losses = {name: measured.loss for name, measured in sets.items()}
    measured = list(sets.values())
    more = {
        name: sum(one.more_losses[name] for one in measured) / len(measured)
        for name in measured[0].more_losses
    }
    mean = sum(losses.values()) / len(losses)
    return mean, losses if len(losses) > 1 else None, more or None


@dataclass(slots=True)
class Ledger:
    """The lines since the last permanent checkpoint, and the digest of all lines."""

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
        """Drop the lines: a permanent checkpoint has them."""
        self.lines = []


def digest_samples(ids: NDArray[np.int64]) -> str:
    """Digest of (n, 2) sample ids in the order of a step; 16 digits distinguish runs."""
    return digest_bytes(np.ascontiguousarray(ids, "<i8").data.cast("B"))[:16]


def parse_ledger(text: bytes) -> list[dict[str, Any]]:
    """The steps of a ledger file."""
    return [json_text.loads(line) for line in text.splitlines() if line.strip()]


def chain(lines: Iterable[str], digest: str = "") -> str:
    """The digest of a ledger with digest `digest`, extended by these lines."""
    for line in lines:
        digest = digest_bytes(f"{digest}\n{line}".encode())
    return digest
