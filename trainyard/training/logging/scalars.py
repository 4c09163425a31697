"""Figures of a step under Megatron-LM's tags for TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainyard.checkpoint.background import SaveReport
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.events import StepEvent
from trainyard.training.loop.ledger import StepRecord
from trainyard.training.options.logging import LoggingConfig

PERPLEXITY_EXPONENT = 20.0
"""Upper bound of the exponent of a perplexity."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One figure of one step."""

    tag: str
    value: float
    has_samples: bool = False
    """Whether it is also logged as `TAG vs samples`, with consumed samples as x axis."""


def step_scalars(event: StepEvent, config: LoggingConfig, info: RunInfo) -> list[Scalar]:
    """The figures of a training step; none for a skipped step and for a second event."""
    record, timing = event.record, event.timing
    if timing is None:
        return []
    next_step, rate_wanted = event.next_step, config.log_learning_rate_to_tensorboard
    rate = None if record.learning_rate is None else next_step.learning_rate
    decoupled = None if rate is None else next_step.decoupled_learning_rate
    found = [
        ("learning-rate", rate, rate_wanted),
        ("decoupled-learning-rate", decoupled, rate_wanted),
        ("batch-size", record.global_batch_size, config.log_batch_size_to_tensorboard),
        ("lm loss", record.lm_loss, True),
        *((name, loss, True) for name, loss in (record.more_losses or {}).items()),
        *((name, value, True) for name, value in (record.layer_figures or {}).items()),
        ("loss-scale", next_step.loss_scale, config.log_loss_scale_to_tensorboard),
        ("world-size", info.world_size, config.log_world_size_to_tensorboard),
        ("grad-norm", record.grad_norm, True),
        ("num-zeros", record.num_zeros, True),
        ("params-norm", record.params_norm, True),
    ]
    scalars = [Scalar(tag, float(v), True) for tag, v, wanted in found if wanted and v is not None]
    scalars.append(Scalar("samples vs steps", float(record.consumed_train_samples)))
    scalars.append(Scalar("iteration-time", timing.ms / 1000.0))
    tokens = info.tokens_per_second_per_gpu(timing)
    scalars.append(Scalar("tokens-per-second-per-gpu", tokens))
    scalars.append(Scalar("throughput", timing.tflops_per_gpu))
    scalars.append(Scalar("data-wait-share", timing.data_wait_ms / timing.ms))
    mfu = info.mfu(timing.tflops_per_gpu)
    if mfu is not None:
        scalars.append(Scalar("mfu", mfu))
    return scalars


def validation_scalars(record: StepRecord, config: LoggingConfig) -> list[Scalar]:
    """The figures of a validation; several sets are numbered as on the console. Megatron-LM has the
    test loss under the tag of the validation loss."""
    scalars = []
    kinds = (
        ("validation", validations(record), record.more_validation_losses),
        ("test", tests(record), record.more_test_losses),
    )
    for kind, losses, more in kinds:
        named = [(f"lm loss {kind}{suffix}", loss) for suffix, loss in losses]
        named += [(f"{name} {kind}", loss) for name, loss in (more or {}).items()]
        for tag, loss in named:
            scalars.append(Scalar(tag, loss, True))
            if config.log_validation_ppl_to_tensorboard:
                scalars.append(Scalar(f"{tag} ppl", perplexity(loss), True))
    return scalars


def validations(record: StepRecord) -> list[tuple[str, float]]:
    """(suffix, loss) of each validation set, numbered as in Megatron-LM; no suffix for a single
    one."""
    return _numbered(record.validation_loss, record.validation_losses)


def tests(record: StepRecord) -> list[tuple[str, float]]:
    """(suffix, loss) of each test set."""
    return _numbered(record.test_loss, record.test_losses)


def _numbered(mean: float | None, losses: Mapping[str, float] | None) -> list[tuple[str, float]]:
    if losses is not None:
        return [(f"-{number}", loss) for number, loss in enumerate(losses.values())]
    return [] if mean is None else [("", mean)]


def save_scalars(report: SaveReport) -> list[Scalar]:
    """The cost of a save, at the saved step."""
    kind = "" if report.kind == "durable" else f"-{report.kind}"
    return [
        Scalar(f"save{kind}-blocked-time", report.blocked_seconds),
        Scalar(f"save{kind}-durable-after-time", report.durable_seconds),
        Scalar(f"save{kind}-gigabytes", report.bytes / 1e9),
        Scalar(f"save{kind}-gigabytes-per-second", report.gigabytes_per_second),
    ]


def perplexity(loss: float) -> float:
    """exp(loss), bounded."""
    return math.exp(min(PERPLEXITY_EXPONENT, loss))


def memory_scalars(device: torch.device) -> list[Scalar]:
    """The memory of a CUDA device now; nothing on the CPU."""
    if device.type != "cuda":
        return []
    stats = torch.cuda.memory_stats(device)
    tags = (
        ("mem-reserved-bytes", "reserved_bytes.all.current"),
        ("mem-allocated-bytes", "allocated_bytes.all.current"),
        ("mem-max-allocated-bytes", "allocated_bytes.all.peak"),
        ("mem-allocated-count", "allocation.all.current"),
    )
    return [Scalar(tag, float(stats.get(key, 0))) for tag, key in tags]
