"""What a run tells of itself while it lasts, under Megatron-LM's names. Standard library only; none
of it changes what a run makes."""

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

    # --- the line on the console ---------------------------------------------------------------

    log_interval: int = execution(100)
    """Steps between two lines on the console."""
    log_throughput: bool = execution(False)
    """Show tokens/s, TFLOP/s and model FLOPs utilisation per GPU in those lines."""
    log_params_norm: bool = execution(False)
    """Measure the L2 norm of all parameters at every step."""
    log_num_zeros_in_grad: bool = execution(False)
    """Count the zeros of the gradient at every step."""
    log_progress: bool = execution(False)
    """Add a line to progress.txt in --save at the start and at every checkpoint: when, on how many
    ranks, how fast."""

    # --- timers --------------------------------------------------------------------------------

    timing_log_level: Literal[0, 1, 2] = execution(0)
    """How finely a step is timed: 0 not at all, 1 its parts, 2 what happens often in it."""
    timing_log_option: Literal["max", "minmax", "all"] = execution("minmax")
    """Of the times of all ranks, show the longest, the shortest and longest, or each."""
    barrier_with_level_1_timing: bool = execution(True)
    """Have ranks wait for each other before each timed part of a step, so that a part is not
    charged with the lateness of others."""

    # --- metrics files -------------------------------------------------------------------------

    metrics_jsonl: str | None = execution(None)
    """Local file that gets a JSON line of all figures at every step."""
    loggers: tuple[str, ...] = execution(())
    """Loggers of installed packages to call: names of entry points in trainyard.loggers."""

    # --- TensorBoard ---------------------------------------------------------------------------

    tensorboard_dir: str | None = execution(None)
    """Folder for TensorBoard; unset: none is written."""
    tensorboard_log_interval: int = execution(1)
    """Steps between two entries for TensorBoard and Weights & Biases."""
    tensorboard_queue_size: int = execution(1000)
    """Entries that wait before TensorBoard's writer makes a step wait."""
    log_timers_to_tensorboard: bool = execution(False)
    """Enter timers too."""
    log_validation_ppl_to_tensorboard: bool = execution(False)
    """Enter perplexities beside validation losses."""
    log_memory_to_tensorboard: bool = execution(False)
    """Enter the memory of rank 0's device."""
    log_world_size_to_tensorboard: bool = execution(False)
    """Enter the number of ranks."""
    log_loss_scale_to_tensorboard: bool = execution(True)
    """Enter the scale of the loss."""
    log_learning_rate_to_tensorboard: bool = execution(True)
    """Enter the learning rate."""
    log_batch_size_to_tensorboard: bool = execution(True)
    """Enter the global batch size."""

    # --- Weights & Biases ----------------------------------------------------------------------

    wandb_project: str = execution("")
    """Project on Weights & Biases; unset: nothing is sent. WANDB_MODE=offline keeps it here."""
    wandb_exp_name: str = execution("")
    """Name of the run there; unset: the name of the --save folder."""
    wandb_save_dir: str = execution("")
    """Folder for its files; unset: a wandb folder where the run was started."""
    wandb_entity: str = execution("")
    """User or team there; unset: the default one of who is logged in."""

    # --- memory and performance ----------------------------------------------------------------

    monitor_memory_continuously: bool = execution(False)
    """Note the memory of every rank all the while, in logs/memory-rankN.jsonl of --save."""
    memory_monitor_interval: float = execution(1.0)
    """Seconds between two such notes."""
    save_performance_summary: bool = execution(False)
    """Write performance.json beside the checkpoints, which the run card shows: speed, times and
    memory of the run."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words."""
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
                        f"{flag} names something of a run on Weights & Biases, and there is none; "
                        "give --wandb-project too"
                    )
        if self.metrics_jsonl is not None and "://" in self.metrics_jsonl:
            raise ConfigError(
                f"--metrics-jsonl {self.metrics_jsonl}: lines are added to a local file; give a "
                "path"
            )
