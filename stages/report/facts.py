"""The facts on a run card. Plain data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.report.lineage import Lineage
from stages.report.retrieval import Retrieval
from trainyard.charts.markup import Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of the training run, and its default."""

    name: str
    value: Any
    default: Any = None
    has_default: bool = False

    @property
    def differs(self) -> bool:
        """True for a value that someone chose; an option that is off or empty was not chosen."""
        if self.has_default:
            return bool(self.value != self.default)
        return self.value not in (None, False, "", [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and the generated text."""

    prompt: str
    continuation: str
    finish_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the ledger, and its timing where the run recorded one."""

    step: int
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    max_expert_load: float | None = None
    """Of the busiest expert of all layers, as a multiple of an even share."""
    min_expert_load: float | None = None
    dropped_tokens: float | None = None
    """Share of the choices of experts that were beyond capacity."""
    more_losses: Mapping[str, float] = field(default_factory=dict)
    """Losses beside that of the tokens, by name."""


@dataclass(frozen=True, slots=True)
class Save:
    """The cost of one save of a step."""

    step: int
    kind: str
    """durable, local, global or upload (see trainyard.checkpoint.background)."""
    size_bytes: int
    blocked_seconds: float
    durable_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Everything on the page. A field that is None or empty has no section."""

    title: str
    lineage: Lineage
    steps: tuple[Step, ...] = ()
    expert_loads: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """After the last step, for each layer with experts: its number, and the share of the choices
    that fell on each expert."""
    options: tuple[Option, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    measured: dict[str, float] = field(default_factory=dict)
    """Step time, throughput and memory of the training."""
    performance: dict[str, Any] | None = None
    """performance.json of the training."""
    saves: tuple[Save, ...] = ()
    """Of all attempts at the run, in the order of their steps."""
    certificate: dict[str, Any] | None = None
    """The document of the certify stage."""
    goodput: dict[str, Any] | None = None
    """Where the time of all attempts went: the document of a flow (flows/goodput/report.py)."""
    num_parameters: int | None = None
    retrieval: Retrieval | None = None
    """What a Retro retrieves."""
    datasheets: tuple[Markup, ...] = ()
    """Sections about the corpora that the tokens were made of."""
    plan: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    num_prompts: int = 0
    """Generations of the benchmark, of which `samples` are the first."""
    evaluated: str = ""
    """Name of the text of the evaluation."""

    @property
    def of_training(self) -> bool:
        """Whether it shows a training, and not only the stages before it."""
        return self.retrieval is None or bool(self.steps)

    @property
    def tokens(self) -> int | None:
        """Tokens seen in training."""
        return next((s.tokens for s in reversed(self.steps) if s.tokens is not None), None)

    @property
    def validation(self) -> tuple[Step, Step] | None:
        """The first and the last step with a validation loss."""
        measured = [s for s in self.steps if s.validation_loss is not None]
        return (measured[0], measured[-1]) if measured else None

    @property
    def training_speed(self) -> float | None:
        """Tokens per second, the median of the logged steps."""
        rates = [step.tokens_per_second for step in self.steps if step.tokens_per_second]
        return statistics.median_high(rates) if rates else None

    @property
    def training_seconds(self) -> float | None:
        """Duration of the training stage, of the last one without a training."""
        destination = self.lineage.destination
        return next((a.seconds for a in self.lineage.artifacts if a.key == destination), None)

    @property
    def total_seconds(self) -> float:
        """Sum of the durations of all stages."""
        return sum(a.seconds or 0.0 for a in self.lineage.artifacts)
