"""Options of `python -m stages.blame`: which run, and what is asked about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.datasets.config import DataConfig
from trainyard.errors import ConfigError

OF_A_STEP = ("micro_batch", "rank", "row")
OF_A_SOURCE = ("line", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDataConfig(DataConfig):
    """The data of a run, which may be told by the run itself."""

    def __post_init__(self) -> None:
        """Nothing need be given; what is must be right."""
        if self.names_data():
            DataConfig.__post_init__(self)

    def names_data(self) -> bool:
        """True when token files are named."""
        paths = self.data_path + self.train_data_path
        lists = (self.data_args_path, self.per_split_data_args_path)
        return bool(paths) or any(lists) or self.mock_data


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameConfig:
    """Say which documents a step or a sample of a run was made of, and where they came from:
    --load RUN --step 120 --rank 3 --row 1. Or where a source was served: --load RUN --source
    corpus.jsonl --line 17. The run is told by --load, or by the options it was started with."""

    load: str | None = location(None)
    """The run, or one of its steps; its options and batch sizes are taken from there, and the
    places of its data too once it is finished."""
    step: int | None = None
    """Step to look into, counted from 1."""
    micro_batch: int | None = None
    """Of the step, this micro-batch of each rank alone, counted from 0."""
    rank: int | None = None
    """Of the step, this data-parallel rank alone."""
    row: int | None = None
    """Of the step, this row of the micro-batches alone."""
    sample: int | None = None
    """Sample to look into, by its number in the training data."""
    source: str | None = None
    """Source to look for: a file that was tokenized, or the end of its path."""
    line: int | None = None
    """Of the source, this line alone, counted from 1."""
    id: str | None = None
    """Of the source, the documents with this id alone."""
    data: RunDataConfig = field(default_factory=RunDataConfig)
    seq_length: int | None = None
    """Tokens of a sample; with --load, the run's."""
    seed: int | None = None
    """Seed of the order of samples; with --load, the run's, otherwise 1234."""
    train_iters: int | None = None
    """Steps of the whole run; with --load, the run's."""
    train_samples: int | None = None
    """Samples of the whole run, in place of --train-iters; with --load, the run's."""
    global_batch_size: int | None = None
    """Samples of a step; with --load, the run's."""
    rampup_batch_size: tuple[int, ...] = ()
    """How that grew at first, START INCREMENT SAMPLES; with --load, the run's."""
    step_batch_size_schedule: str | None = None
    """... or changed, TOKENS:SIZE ...; with --load, the run's."""
    decrease_batch_size_if_needed: bool = False
    """Whether a batch was lowered to what ranks fill; with --load, as in the run."""
    micro_batch_size: int | None = None
    """Samples that a rank works on at once; with --load, the run's."""
    data_parallel_size: int | None = None
    """Data-parallel ranks; with --load, of the steps for which the run does not tell, otherwise
    1."""
    check_data: bool = execution(True)
    """With --load, compare the digests of the token files with those that the run was made of."""
    max_rows: int = execution(100)
    """Pieces of documents to print at most; 0 prints all."""
    json: bool = execution(False)
    """Print one JSON document in place of the table."""

    def __post_init__(self) -> None:
        """Refuse questions that are none, or two."""
        asked = [name for name in ("step", "sample", "source") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise ConfigError(
                "give one of --step (with --rank, --row, --micro-batch), --sample and --source "
                f"(with --line or --id); {len(asked)} of them were given"
            )
        for names, owner in ((OF_A_STEP, "step"), (OF_A_SOURCE, "source")):
            for name in names:
                if getattr(self, name) is not None and asked != [owner]:
                    raise ConfigError(f"--{name.replace('_', '-')} goes with --{owner} alone")
        for name, least in {"step": 1, "line": 1, "max_rows": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {value}"
                )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None that count: nothing is made of what is read."""
        return {}

    def output(self) -> Output | None:
        """Nothing is written."""
        return None
