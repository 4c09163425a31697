"""Options of `python -m stages.report`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import location
from trainyard.errors import ConfigError

ARTIFACTS = (
    "corpus",
    "tokenizer",
    "tokens",
    "plan",
    "checkpoint",
    "export",
    "evaluation",
    "benchmark",
)
"""Options that name an artifact to show, in the order in which a run makes them."""

MAX_SAMPLES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Show a run as one self-contained page: curves, samples, tables, and where it all came
    from."""

    checkpoint: str = location()
    """Run folder of the trained checkpoint."""
    corpus: str | None = location(None)
    """Collected corpus."""
    tokenizer: str | None = location(None)
    """Trained tokenizer."""
    tokens: str | None = location(None)
    """Prefix of the token files that the run was trained on."""
    plan: str | None = location(None)
    """What the plan stage foresaw."""
    export: str | None = location(None)
    """The checkpoint in another layout or format."""
    evaluation: str | None = location(None)
    """Folder of the evaluation's results.json."""
    benchmark: str | None = location(None)
    """Folder of the benchmark's generations.json and timings.json."""
    certificate: str | None = location(None)
    """What certify wrote about the run (--output)."""
    goodput: str | None = location(None)
    """Where the time of the run went, over all attempts: what a flow keeps in goodput/JOB.json;
    shown if it is there. Its times are of no account for whether the page is made anew."""
    output_prefix: str = location()
    """Where to write: PREFIX.html and PREFIX.summary.json."""
    title: str = ""
    """Name of the run at the head of the page; unset: the folder that holds the output."""
    num_samples: int = 3
    """Generations of the benchmark to show."""

    def __post_init__(self) -> None:
        """Refuse a number of samples that no page has."""
        if not 0 <= self.num_samples <= MAX_SAMPLES:
            raise ConfigError(
                f"--num-samples must be between 0 and {MAX_SAMPLES}, got {self.num_samples}"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Every artifact that was named."""
        named = {name: getattr(self, name) for name in ARTIFACTS}
        named["certificate"] = self.certificate
        return {name: (url,) for name, url in named.items() if url is not None}

    def output(self) -> Output | None:
        """A prefix."""
        return Output.prefix(self.output_prefix)
