"""Length, batch size, validation and saves of a training run, under Megatron-LM's names. Standard
library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import (
    MAX_PROCESSES,
    MAX_SAMPLES,
    MAX_SIZE,
    MAX_STEPS,
    also,
    check_at_least,
    check_at_most,
    course,
    execution,
)
from trainyard.errors import ConfigError

AT_LEAST_ONE = (
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "epochs",
    "eval_interval",
    "num_threads",
    "save_interval",
    "save_retain_interval",
    "save_keep_last",
    "exit_interval",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How long to train, in what batches, and how often to validate and save."""

    micro_batch_size: int = also("batch_size", role="execution")
    """Samples that a rank processes at once."""
    global_batch_size: int | None = course(None)
    """Samples of an optimizer step over all ranks; unset: one micro-batch on each rank."""
    rampup_batch_size: tuple[int, ...] = course(())
    """START INCREMENT SAMPLES: begin with a global batch of START and add INCREMENT evenly over
    the first SAMPLES samples until --global-batch-size is reached."""
    step_batch_size_schedule: str | None = course(None)
    """TOKENS:SIZE ...: the global batch from each number of consumed tokens on, as in
    "0:768 250B:1536" (K, M, B, T)."""
    decrease_batch_size_if_needed: bool = course(False)
    """Lower a batch size to a multiple of micro-batch size x data-parallel ranks."""
    train_iters: int | None = also("train_steps", default=None, role="course")
    """Optimizer steps of the whole run; this or --train-samples."""
    train_samples: int | None = course(None)
    """Samples of the whole run; this or --train-iters."""
    epochs: int | None = course(None)
    """Passes over the training split, in place of --train-samples; with --train-iters, the shorter
    of the two applies."""
    eval_interval: int = course(1000)
    """Steps between two validations."""
    eval_iters: int = course(100)
    """Global batches of a validation, and of the test at the end; 0: none."""
    eval_at_start: bool = course(False)
    """Validate before the first step too."""
    iterations_to_skip: tuple[int, ...] = course(())
    """Steps that skip their samples without an update, for example samples known to do harm."""
    calculate_per_token_loss: bool = False
    """Give every token of a step the same weight, even if micro-batches have different numbers of
    tokens."""
    seed: int = 1234
    """Seed of initial weights, dropout and the order of samples."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device to compute on; auto: CUDA if torch finds one."""
    compile_layers: Literal["auto", "on", "off"] = execution("auto")
    """Compile each layer with torch.compile; auto: on CUDA."""
    deterministic_mode: bool = course(False)
    """On CUDA, use only operations that give the same bits every time; on CPUs this always
    holds."""
    num_threads: int | None = execution(None)
    """CPU threads of a rank; unset: OMP_NUM_THREADS, or else the cores divided by the ranks of a
    machine. Another number changes the last digits of results, because sums are grouped by
    thread."""
    manual_gc: bool = execution(False)
    """Run Python's garbage collector at the same steps on all ranks, not at any time on each."""
    manual_gc_interval: int = execution(0)
    """Steps between two collections with --manual-gc; 0: only around checkpoints and
    validations."""
    save_interval: int | None = execution(None)
    """Steps between two checkpoints; the last step is always saved."""
    save_retain_interval: int | None = execution(None)
    """Keep only the multiples of this and the last step, and remove other steps once newer ones
    exist; a multiple of --save-interval. Unset: keep all."""
    save_keep_last: int = execution(1)
    """Number of newest steps to keep in any case while the run is unfinished."""
    async_save: bool | None = execution(None)
    """Continue training while a checkpoint is written. Training waits only for a copy to host
    memory, which takes as much memory as this rank writes. Unset: on GPUs, if all hosts have room
    for the copies; --no-async-save: never."""
    save_optim: bool = execution(True)
    """Save the optimizer with the weights. Without it the run cannot resume from the step, and only
    --finetune and tools can use it."""
    exit_interval: int | None = execution(None)
    """Save and stop, unfinished, at multiples of this step; the same command resumes."""
    exit_duration_in_mins: float | None = execution(None)
    """Save and stop, unfinished, after the first step that ends this many minutes after the start;
    the same command resumes."""
    exit_signal_handler: bool = execution(True)
    """Save and stop on SIGTERM, SIGINT or SIGUSR1; always on, and cannot be turned off."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_at_least(self, 1, *AT_LEAST_ONE)
        check_at_most(self, MAX_SIZE, "micro_batch_size", "global_batch_size")
        check_at_most(self, MAX_STEPS, "train_iters", "eval_iters")
        check_at_most(self, MAX_SAMPLES, "train_samples")
        check_at_most(self, MAX_PROCESSES, "num_threads")
        retain, interval = self.save_retain_interval, self.save_interval
        if retain is not None and (interval is None or retain % interval):
            raise ConfigError(
                f"--save-retain-interval {retain} must be a multiple of --save-interval "
                f"({interval}), because other steps are not saved"
            )
        if self.eval_iters < 0:
            raise ConfigError(f"--eval-iters must be at least 0, got {self.eval_iters}")
        if self.manual_gc_interval < 0:
            raise ConfigError(
                f"--manual-gc-interval must be at least 0, got {self.manual_gc_interval}"
            )
        if not self.exit_signal_handler:
            raise ConfigError(
                "--no-exit-signal-handler: SIGTERM, SIGINT and SIGUSR1 always make a run save and "
                "stop, and a second SIGINT stops at once; leave the option out"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be between 0 and 2^32 - 1, got {self.seed}")
        given = (self.train_iters, self.train_samples, self.epochs)
        if given == (None, None, None) or None not in given[:2]:
            raise ConfigError("give --train-iters or --train-samples, one of them, or --epochs")
        self._check_evaluation()
        if self.exit_duration_in_mins is not None and not self.exit_duration_in_mins > 0:
            raise ConfigError(
                f"--exit-duration-in-mins must be above 0, got {self.exit_duration_in_mins}"
            )

    def _check_evaluation(self) -> None:
        if self.eval_at_start and not self.eval_iters:
            raise ConfigError(
                "--eval-at-start measures nothing with --eval-iters 0; leave one of them out"
            )

    def evaluation_steps(self, steps: int) -> list[int]:
        """The validation steps of a run of `steps` steps, with the last one."""
        if not self.eval_iters:
            return []
        found = set(range(self.eval_interval, steps + 1, self.eval_interval))
        return sorted(found | {steps} | ({0} if self.eval_at_start else set()))
