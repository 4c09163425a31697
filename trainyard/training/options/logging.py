"""Logging of a run, under Megatron-LM's names. None of it changes the result. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution
from trainyard.errors import ConfigError

POSITIVE = (
    "log_interval",
    "tensorboard_log_interval",
    "tensorboard_queue_size",
    "memory_monitor_interval",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Console, metrics files, TensorBoard, Weights & Biases, timers and memory."""

    # --- console -------------------------------------------------------------------------------

    log_interval: int = execution(100)
    """Steps between two lines on the console."""
    log_throughput: bool = execution(False)
    """Show tokens/s, TFLOP/s and model FLOPs utilisation per GPU in console lines."""
    log_params_norm: bool = execution(False)
    """Measure the L2 norm of all parameters at every step."""
    log_num_zeros_in_grad: bool = execution(False)
    """Count the zeros of the gradient at every step."""
    log_progress: bool = execution(False)
    """Add a line to progress.txt in --save at the start and at every checkpoint: time, ranks,
    speed."""

    # --- timers --------------------------------------------------------------------------------

    timing_log_level: Literal[0, 1, 2] = execution(0)
    """Timers of a step: 0 none, 1 its parts, 2 also parts that run many times in it."""
    timing_log_option: Literal["max", "minmax", "all"] = execution("minmax")
    """Times of timers to show: the longest over all ranks, the shortest and longest, or all."""
    barrier_with_level_1_timing: bool = execution(True)
    """Wait for all ranks before each timed part of a step, so that its time excludes waits for late
    ranks."""

    # --- metrics files -------------------------------------------------------------------------

    metrics_jsonl: str | None = execution(None)
    """Local file for a JSON line of all figures at every step."""
    loggers: tuple[str, ...] = execution(())
    """Loggers of installed packages: names of entry points in the group trainyard.loggers."""

    # --- TensorBoard ---------------------------------------------------------------------------

    tensorboard_dir: str | None = execution(None)
    """Folder for TensorBoard; unset: none."""
    tensorboard_log_interval: int = execution(1)
    """Steps between two entries for TensorBoard and Weights & Biases."""
    tensorboard_queue_size: int = execution(1000)
    """Length of TensorBoard's write queue; a full queue delays a step."""
    log_timers_to_tensorboard: bool = execution(False)
    """Log timers to TensorBoard and Weights & Biases too."""
    log_validation_ppl_to_tensorboard: bool = execution(False)
    """Log perplexities beside validation losses."""
    log_memory_to_tensorboard: bool = execution(False)
    """Log the memory of rank 0's device."""
    log_world_size_to_tensorboard: bool = execution(False)
    """Log the number of ranks."""
    log_loss_scale_to_tensorboard: bool = execution(True)
    """Log the scale of the loss."""
    log_learning_rate_to_tensorboard: bool = execution(True)
    """Log the learning rate."""
    log_batch_size_to_tensorboard: bool = execution(True)
    """Log the global batch size."""

    # --- Weights & Biases ----------------------------------------------------------------------

    wandb_project: str = execution("")
    """Project on Weights & Biases; unset: none. WANDB_MODE=offline stores the run locally."""
    wandb_exp_name: str = execution("")
    """Name of the run on Weights & Biases; unset: the name of the --save folder."""
    wandb_save_dir: str = execution("")
    """Folder for the files of Weights & Biases; unset: wandb/ in the working directory."""
    wandb_entity: str = execution("")
    """User or team on Weights & Biases; unset: the default of the account."""

    # --- memory and performance ----------------------------------------------------------------

    monitor_memory_continuously: bool = execution(False)
    """Record the memory of every rank in logs/memory-rankN.jsonl of --save."""
    memory_monitor_interval: float = execution(1.0)
    """Seconds between two records of --monitor-memory-continuously."""
    save_performance_summary: bool = execution(False)
    """Write performance.json to --save, for the run card: speed, times and memory of the run."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        for name in POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                least = "above 0" if isinstance(value, float) else "at least 1"
                raise ConfigError(f"--{name.replace('_', '-')} must be {least}, got {value}")
        if not self.wandb_project:
            for name in ("wandb_exp_name", "wandb_save_dir", "wandb_entity"):
                if getattr(self, name):
                    flag = f"--{name.replace('_', '-')}"
                    raise ConfigError(
                        f"{flag} belongs to a run on Weights & Biases, which needs "
                        "--wandb-project; give that too"
                    )
        if self.metrics_jsonl is not None and "://" in self.metrics_jsonl:
            raise ConfigError(
                f"--metrics-jsonl {self.metrics_jsonl}: must be a local file; give a path"
            )
