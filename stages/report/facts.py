"""The facts on a run card. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stages.report.lineage import Lineage
from stages.report.profiles import Profile
from stages.report.retrieval import Retrieval
from stages.report.steps import Steps
from stages.report.toxicity import Toxicity
from trainyard.charts.markup import Markup
from trainyard.charts.points import Point


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
    steps: Steps = field(default_factory=Steps)
    expert_loads: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """After the last step, for each layer with experts: its number, and the share of the choices
    that fell on each expert."""
    expert_drops: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """With a capacity, likewise the share of each expert's choices that were beyond it."""
    options: tuple[Option, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    profiles: tuple[Profile, ...] = ()
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
    load: dict[str, Any] | None = None
    """summary.json of a load test."""
    parity: dict[str, Any] | None = None
    """parity.json: differences between the training's forward and the engines."""
    quantization: dict[str, Any] | None = None
    """quantization.json: sizes and perplexities before and after."""
    toxicity: Toxicity | None = None
    """What the model writes before and after the training."""
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
        found = self.steps.last("tokens")
        return None if found is None else int(found)

    @property
    def validation(self) -> tuple[Point, Point] | None:
        """The first and the last step with a validation loss, with that."""
        measured = self.steps.points("validation_loss")
        return (measured[0], measured[-1]) if measured else None

    @property
    def training_speed(self) -> float | None:
        """Tokens per second, the median of the logged steps."""
        rates = sorted(rate for _, rate in self.steps.points("tokens_per_second") if rate)
        return rates[len(rates) // 2] if rates else None

    @property
    def training_seconds(self) -> float | None:
        """Duration of the training stage, of the last one without a training."""
        destination = self.lineage.destination
        return next((a.seconds for a in self.lineage.artifacts if a.key == destination), None)

    @property
    def total_seconds(self) -> float:
        """Sum of the durations of all stages."""
        return sum(a.seconds or 0.0 for a in self.lineage.artifacts)
