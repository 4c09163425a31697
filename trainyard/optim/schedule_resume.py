"""Chooses the schedule when a run resumes: the options' or the checkpoint's.

As in Megatron-LM they must agree, unless an option says which side wins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import LearningRateSchedule, OptimizerSchedule, WeightDecaySchedule

log = logging.getLogger(__name__)

PARTS = ("learning_rate", "weight_decay", "decoupled")

OPTIONS = {
    "init_lr": "--lr-warmup-init",
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_steps": "--lr-warmup-iters (or -samples, -fraction)",
    "decay_steps": "--lr-decay-iters (or -samples; the run unless given)",
    "wsd_decay_steps": "--lr-wsd-decay-iters (or -samples)",
    "wsd_style": "--lr-wsd-decay-style",
    "start": "--start-weight-decay",
    "end": "--end-weight-decay (or --weight-decay)",
    "steps": "--train-iters (or -samples)",
}

P = TypeVar("P", LearningRateSchedule, WeightDecaySchedule)


def optimizer_schedule_document(schedule: OptimizerSchedule) -> dict[str, Any]:
    """The schedule as a checkpoint keeps it; JSON-able."""
    parts = {part: getattr(schedule, part) for part in PARTS}
    return {name: asdict(part) for name, part in parts.items() if part is not None}


def stored_optimizer_schedule(document: Mapping[str, Any]) -> OptimizerSchedule:
    """The schedule of an `optimizer_schedule_document`; TypeError or KeyError for any other."""
    decoupled = document.get("decoupled")
    return OptimizerSchedule(
        LearningRateSchedule(**document["learning_rate"]),
        WeightDecaySchedule(**document["weight_decay"]),
        None if decoupled is None else LearningRateSchedule(**decoupled),
    )


def resume_optimizer_schedule(
    schedule: OptimizerSchedule, document: Mapping[str, Any], config: OptimizerConfig
) -> OptimizerSchedule:
    """The schedule for resuming from a checkpoint with this `optimizer_schedule_document`.

    Raises ConfigError that names every difference when no option says which side wins."""
    stored = OptimizerSchedule(
        _parse(LearningRateSchedule, document["learning_rate"], schedule.learning_rate),
        _parse(WeightDecaySchedule, document["weight_decay"], schedule.weight_decay),
        _parse(LearningRateSchedule, document["decoupled"], schedule.learning_rate)
        if "decoupled" in document
        else None,
    )
    differences = _differences(schedule, stored)
    if not differences:
        return schedule
    listed = "; ".join(differences)
    if config.override_opt_param_scheduler:
        log.info(
            "--override-opt-param-scheduler: these options replace the checkpoint's: %s", listed
        )
        return schedule
    if config.use_checkpoint_opt_param_scheduler:
        log.info("--use-checkpoint-opt-param-scheduler: the checkpoint's replace these: %s", listed)
        return stored
    raise ConfigError(
        f"the rates of the checkpoint are not those of the options: {listed}; give "
        "--override-opt-param-scheduler to use the options, or "
        "--use-checkpoint-opt-param-scheduler to use the checkpoint's"
    )


def _parse(kind: type[P], document: Mapping[str, Any], ours: P) -> P:
    """The stored values; fields that an older version lacks take those of the current options."""
    values = {f.name: document.get(f.name, getattr(ours, f.name)) for f in fields(kind)}
    return kind(**values)


def _differences(ours: OptimizerSchedule, stored: OptimizerSchedule) -> list[str]:
    found = []
    for part in PARTS:
        here, there = getattr(ours, part), getattr(stored, part)
        if here is None or there is None:
            if here is not there:
                found.append(f"--decoupled-lr is {_rate(here)} here and {_rate(there)} there")
            continue
        if _is_constant(here) and _is_constant(there):
            here, there = replace(here, steps=0), replace(there, steps=0)
        for field in fields(here):
            mine, theirs = getattr(here, field.name), getattr(there, field.name)
            if mine != theirs:
                option = _option(part, field.name)
                unit = " samples" if field.name.endswith("steps") else ""
                found.append(f"{option} is {mine}{unit} here and {theirs}{unit} there")
    return found


def _is_constant(schedule: LearningRateSchedule | WeightDecaySchedule) -> bool:
    """Whether its length makes no difference, as a longer run may find."""
    return isinstance(schedule, WeightDecaySchedule) and schedule.start == schedule.end


def _option(part: str, name: str) -> str:
    if name == "style":
        return "--weight-decay-incr-style" if part == "weight_decay" else "--lr-decay-style"
    option = OPTIONS[name]
    if part == "decoupled" and name in ("max_lr", "min_lr"):
        return "--decoupled-" + option.removeprefix("--")
    return option


def _rate(schedule: LearningRateSchedule | None) -> str:
    return "unset" if schedule is None else str(schedule.max_lr)
