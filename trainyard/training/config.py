"""The length, batch and rhythm of a training run, under Megatron-LM's names. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How long to train, in what batches, and how often to look up."""

    micro_batch_size: int
    """Samples that a rank works on at once."""
    global_batch_size: int | None = None
    """Samples of an optimizer step over all ranks; unset: one micro-batch on each rank."""
    train_iters: int
    """Optimizer steps of the whole run."""
    eval_interval: int = 1000
    """Steps between two measurements of the validation loss."""
    eval_iters: int = 100
    """Global batches of a measurement; 0 measures nothing."""
    eval_at_start: bool = False
    """Measure the validation loss before the first step too."""
    calculate_per_token_loss: bool = False
    """Weigh every token of a step alike, where micro-batches hold different numbers of them."""
    seed: int = 1234
    """Seed of initial weights, dropout and the order of samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where torch sees a device."""
    deterministic_mode: bool = False
    """On CUDA, only operations that give the same bits every time; on CPUs that is always so."""
    num_threads: int | None = execution(None)
    """CPU threads of a rank; unset: OMP_NUM_THREADS, else the cores divided by the ranks of a
    machine. Sums are grouped by thread, so another number changes the last digits."""
    log_interval: int = execution(100)
    """Steps between two lines on the console."""
    log_throughput: bool = execution(False)
    """Show TFLOP/s per GPU in those lines."""
    save_interval: int | None = execution(None)
    """Steps between two checkpoints; the last step is always saved."""
    exit_interval: int | None = execution(None)
    """Save and stop, unfinished, at a step that this divides; the same command continues."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words."""
        for name in (
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "eval_interval",
            "num_threads",
            "log_interval",
            "save_interval",
            "exit_interval",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.eval_iters < 0:
            raise ConfigError(f"--eval-iters must be at least 0, got {self.eval_iters}")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be between 0 and 2^32 - 1, got {self.seed}")
        if self.eval_at_start and not self.eval_iters:
            raise ConfigError(
                "--eval-at-start measures nothing with --eval-iters 0; give one of them up"
            )

    def evaluation_steps(self) -> list[int]:
        """The steps after which the validation loss is measured; the last step is one of them."""
        if not self.eval_iters:
            return []
        steps = set(range(self.eval_interval, self.train_iters + 1, self.eval_interval))
        return sorted(steps | {self.train_iters} | ({0} if self.eval_at_start else set()))
