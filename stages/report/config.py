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
    "parity",
    "quantized",
    "evaluation_before",
    "toxicity_before",
    "toxicity_after",
    "retro_neighbors",
)
"""Options that name an artifact to show, in the order of the stages."""

MAX_SAMPLES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Write a run as one self-contained HTML page: loss curves, samples, tables and lineage; for a
    Retro what it retrieves."""

    checkpoint: str | None = location(None)
    """Run folder of the trained checkpoint; may be left out with --retro-neighbors."""
    corpus: str | None = location(None)
    """Collected corpus."""
    tokenizer: str | None = location(None)
    """Trained tokenizer."""
    tokens: str | None = location(None)
    """Prefix of the token files that the run was trained on."""
    plan: str | None = location(None)
    """Output of the plan stage."""
    export: str | None = location(None)
    """The checkpoint in another layout or format."""
    evaluation: str | None = location(None)
    """Folder of the evaluation's results.json."""
    benchmark: str | None = location(None)
    """Folder of the benchmark's generations.json and timings.json, or of a load test's
    summary.json."""
    parity: str | None = location(None)
    """Folder of the parity stage: log-probabilities of the training beside those of the engines."""
    quantized: str | None = location(None)
    """Folder of the quantize stage: the perplexity before and after."""
    evaluation_before: str | None = location(None)
    """Folder of the results.json of the model that the training began with."""
    toxicity_before: str | None = location(None)
    """Scores of what that model writes: a folder of the score stage."""
    toxicity_after: str | None = location(None)
    """Scores of what the trained model writes."""
    retro_neighbors: str | None = location(None)
    """Table of neighbours, the output of faiss_query: some chunks with their neighbours, and the
    recall of the index."""
    certificate: str | None = location(None)
    """Certificate of the run: --output of certify."""
    goodput: str | None = location(None)
    """Where the time of the run went, over all attempts: goodput/JOB.json of a flow. Shown if the
    file exists; a change of the file alone does not rebuild the page."""
    datasheets: tuple[str, ...] = location(())
    """Datasheets of the corpora that the tokens were made of: --output-prefix of datasheet."""
    output_prefix: str = location()
    """Where to write: PREFIX.html and PREFIX.summary.json."""
    title: str = ""
    """Name of the run at the top of the page; unset: the folder of the output."""
    num_samples: int = MAX_SAMPLES
    """Generations of the benchmark to show; the page says how many there are."""

    def __post_init__(self) -> None:
        """Refuse a number of samples out of range, and a page about nothing."""
        if self.checkpoint is None and self.retro_neighbors is None:
            raise ConfigError(
                "--checkpoint, the folder of a run, is missing; without a training, "
                "--retro-neighbors shows what the stages of Retro made"
            )
        if (self.toxicity_before is None) != (self.toxicity_after is None):
            raise ConfigError(
                "--toxicity-before and --toxicity-after stand side by side; give both, or neither"
            )
        if not 0 <= self.num_samples <= MAX_SAMPLES:
            raise ConfigError(
                f"--num-samples must be between 0 and {MAX_SAMPLES}, got {self.num_samples}"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Every artifact that an option names."""
        named = {name: getattr(self, name) for name in ARTIFACTS}
        named["certificate"] = self.certificate
        given = {name: (url,) for name, url in named.items() if url is not None}
        return {**given, **({"datasheets": self.datasheets} if self.datasheets else {})}

    def output(self) -> Output | None:
        """A prefix."""
        return Output.prefix(self.output_prefix)
