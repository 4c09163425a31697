"""Options of `python -m stages.index`: those of `pretrain` that decide which samples it takes."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import MAX_SIZE, also, check_at_least, check_at_most, location
from trainyard.datasets.config import DataConfig
from trainyard.errors import ConfigError
from trainyard.training.options.training import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Build the sample indices of a training run in advance. Give it the options of `pretrain`, and
    then give `pretrain` the folder as --data-cache-path."""

    data: DataConfig
    seq_length: int
    """Tokens of a sample."""
    global_batch_size: int
    """Samples of an optimizer step over all ranks."""
    train_iters: int | None = also("train_steps", default=None)
    """Optimizer steps of the whole run; this or --train-samples."""
    train_samples: int | None = None
    """Samples of the whole run; this or --train-iters."""
    rampup_batch_size: tuple[int, ...] = ()
    """START INCREMENT SAMPLES, as for pretrain."""
    step_batch_size_schedule: str | None = None
    """TOKENS:SIZE ..., as for pretrain."""
    eval_interval: int = 1000
    """Steps between two measurements of the validation loss."""
    eval_iters: int = 100
    """Global batches of a measurement of validation data, and of test data at the end; 0: no
    measurements."""
    eval_at_start: bool = False
    """Measure the validation loss before the first step too."""
    seed: int = 1234
    """Seed of the order of samples."""
    output_dir: str = location()
    """Folder or URL for the indices."""

    def __post_init__(self) -> None:
        """Refuse contradictory options."""
        check_at_least(self, 1, "seq_length")
        check_at_most(self, MAX_SIZE, "seq_length")
        if self.data.data_cache_path is not None:
            raise ConfigError(
                "--data-cache-path is where pretrain looks for indices; this stage writes them to "
                "--output-dir, so leave it out here, and give pretrain that folder"
            )
        self.training()

    def training(self) -> TrainingConfig:
        """The options of the run that determine its samples."""
        return TrainingConfig(
            micro_batch_size=1,
            global_batch_size=self.global_batch_size,
            train_iters=self.train_iters,
            train_samples=self.train_samples,
            rampup_batch_size=self.rampup_batch_size,
            step_batch_size_schedule=self.step_batch_size_schedule,
            eval_interval=self.eval_interval,
            eval_iters=self.eval_iters,
            eval_at_start=self.eval_at_start,
            seed=self.seed,
        )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Each prefix of token files."""
        return self.data.inputs()

    def output(self) -> Output:
        """The folder of the indices."""
        return Output.directory(self.output_dir)
