"""Options of a training that decide which samples it takes, for stages that need its samples and
not its model. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import MAX_SIZE, also, check_at_least, check_at_most
from trainyard.datasets.config import DataConfig
from trainyard.training.options.training import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamplesConfig:
    """The data of a run, its length, and the order of its samples."""

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

    def __post_init__(self) -> None:
        """Refuse contradictory options."""
        check_at_least(self, 1, "seq_length")
        check_at_most(self, MAX_SIZE, "seq_length")
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
