"""What a run card knows: artifacts and how they hang together, curves, results. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A finished artifact as its manifest describes it, or a raw source that has none."""

    key: str
    """Unique in a card: its URL."""
    stage: str
    """The stage that made it; empty for a raw source."""
    digest: str
    size_bytes: int | None = None
    num_files: int = 0
    count: int = 1
    """Artifacts that this one stands for, when many alike are shown as one."""
    alias: str = ""
    """What it is called where its stage would not tell it from another."""
    seconds: float | None = None
    started: str = ""
    code: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in the picture."""
        return self.alias or self.stage.replace("_", " ") or "source"

    @property
    def label(self) -> str:
        """The name, and of how many."""
        return f"{self.name} \u00d7{self.count}" if self.count > 1 else self.name

    @property
    def long_label(self) -> str:
        """The stage in front of an alias."""
        stage = self.stage.replace("_", " ")
        return f"{stage}, {self.label}" if stage and self.alias else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Artifacts in an order in which they could be made, and which of them went into which."""

    artifacts: tuple[Artifact, ...]
    edges: tuple[tuple[str, str], ...]
    """(from, to), by key."""
    destination: str
    """Key of the checkpoint, the end of the main line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of the training run and what it would have been."""

    name: str
    value: Any
    default: Any = None
    has_default: bool = False

    @property
    def differs(self) -> bool:
        """True for a value that someone chose; an option left off or empty was not."""
        if self.has_default:
            return bool(self.value != self.default)
        return self.value not in (None, False, "", [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    continuation: str
    finish_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the ledger, with its times where they were kept."""

    step: int
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """What one save of a step cost."""

    step: int
    kind: str
    """durable, local, global or upload (see trainyard.checkpoint.background)."""
    size_bytes: int
    blocked_seconds: float
    durable_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Everything on the page; what is None or empty was not given and is left out."""

    title: str
    lineage: Lineage
    steps: tuple[Step, ...] = ()
    options: tuple[Option, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    measured: dict[str, float] = field(default_factory=dict)
    """Step time, throughput and memory of the training."""
    performance: dict[str, Any] | None = None
    """performance.json of the training, where it was written."""
    saves: tuple[Save, ...] = ()
    """Of all attempts at the run, in the order of their steps."""
    certificate: dict[str, Any] | None = None
    """What certify wrote about the run."""
    goodput: dict[str, Any] | None = None
    """Where the time of all attempts went, as a flow keeps it."""
    num_parameters: int | None = None
    plan: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()

    @property
    def tokens(self) -> int | None:
        """Tokens seen in training."""
        return next((s.tokens for s in reversed(self.steps) if s.tokens is not None), None)

    @property
    def validation(self) -> tuple[Step, Step] | None:
        """The first and the last step at which validation loss was measured."""
        measured = [s for s in self.steps if s.validation_loss is not None]
        return (measured[0], measured[-1]) if measured else None

    @property
    def training_seconds(self) -> float | None:
        """Duration of the training stage."""
        made = [a for a in self.lineage.artifacts if a.key == self.lineage.destination]
        return made[0].seconds if made else None

    @property
    def total_seconds(self) -> float:
        """Duration of all stages, one after the other."""
        return sum(a.seconds or 0.0 for a in self.lineage.artifacts)
