"""Options of `python -m stages.blame`: the run, and the question."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainyard.artifacts.output import Output
from trainyard.config import check_at_least, execution, location
from trainyard.datasets.config import DataConfig
from trainyard.errors import ConfigError

OF_A_STEP = ("micro_batch", "rank", "row")
OF_A_SOURCE = ("line", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDataConfig(DataConfig):
    """The data of a run; unset: that of the run of --load."""

    def __post_init__(self) -> None:
        """Check the options only when token files are named."""
        if self.names_data():
            DataConfig.__post_init__(self)

    def names_data(self) -> bool:
        """True when token files are named."""
        paths = self.data_path + self.train_data_path
        lists = (self.data_args_path, self.per_split_data_args_path)
        return bool(paths) or any(lists) or self.mock_data


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameConfig:
    """Show the documents of a step or a sample of a run, and their sources: --load RUN --step 120
    --rank 3 --row 1. Or show the steps that served a source: --load RUN --source corpus.jsonl
    --line 17. Name the run by --load, or by the options that started it."""

    load: str | None = location(None)
    """Run folder, or one of its steps. Gives the options and batch sizes; of a finished run also
    the paths of its data."""
    step: int | None = None
    """Step to show, counted from 1."""
    micro_batch: int | None = None
    """Show only this micro-batch of each rank, counted from 0."""
    rank: int | None = None
    """Show only this data-parallel rank."""
    row: int | None = None
    """Show only this row of the micro-batches."""
    sample: int | None = None
    """Sample to show, by its number in the training data."""
    source: str | None = None
    """Source to find: a file that was tokenized, or the end of its path."""
    line: int | None = None
    """Find only this line of the source, counted from 1."""
    id: str | None = None
    """Find only the documents of the source with this id."""
    data: RunDataConfig = field(default_factory=RunDataConfig)
    seq_length: int | None = None
    """Tokens of a sample; with --load, the run's."""
    seed: int | None = None
    """Seed of the order of samples; with --load, the run's, otherwise 1234."""
    train_iters: int | None = None
    """Steps of the whole run; with --load, the run's."""
    train_samples: int | None = None
    """Samples of the whole run, instead of --train-iters; with --load, the run's."""
    global_batch_size: int | None = None
    """Samples of a step; with --load, the run's."""
    rampup_batch_size: tuple[int, ...] = ()
    """Growth of the global batch size, START INCREMENT SAMPLES; with --load, the run's."""
    step_batch_size_schedule: str | None = None
    """Changes of the global batch size, TOKENS:SIZE ...; with --load, the run's."""
    decrease_batch_size_if_needed: bool = False
    """Whether the run lowered batch sizes to a multiple that its ranks fill; with --load, the
    run's."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch; with --load, the run's."""
    data_parallel_size: int | None = None
    """Data-parallel ranks. With --load, only for steps whose number the run did not record;
    without, unset: 1."""
    check_data: bool = execution(True)
    """With --load, compare the digests of the token files with those of the run's inputs."""
    max_rows: int = execution(100)
    """Pieces of documents to print at most; 0 prints all."""
    json: bool = execution(False)
    """Print one JSON document instead of the table."""

    def __post_init__(self) -> None:
        """Refuse anything but one question."""
        asked = [name for name in ("step", "sample", "source") if getattr(self, name) is not None]
        if len(asked) != 1:
            raise ConfigError(
                "give one of --step (with --rank, --row, --micro-batch), --sample and --source "
                f"(with --line or --id); {len(asked)} of them were given"
            )
        for names, owner in ((OF_A_STEP, "step"), (OF_A_SOURCE, "source")):
            for name in names:
                if getattr(self, name) is not None and asked != [owner]:
                    raise ConfigError(f"--{name.replace('_', '-')} requires --{owner}")
        check_at_least(self, 1, "step", "line")
        check_at_least(self, 0, "micro_batch", "rank", "row", "sample", "max_rows")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: blame writes no artifact."""
        return {}

    def output(self) -> Output | None:
        """None."""
        return None
