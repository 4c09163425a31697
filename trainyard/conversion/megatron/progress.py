"""How far a run of Megatron-LM had come, as its files tell it: iteration, samples, schedules.

A run that goes on from here takes its data and its learning rate by these numbers, so they must
agree with each other, and one that no run writes is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainyard.artifacts.strict_json import MAX_COUNT, shown
from trainyard.conversion.write_native import SCHEDULER
from trainyard.errors import ArtifactError

STYLES = ("lr_decay_style", "wd_incr_style")
"""Which of a schedule's values are words."""


def iteration_in(tree: Mapping[str, Any], where: str) -> int | None:
    """The iteration that a file says it is of; None where it says nothing, as some of 2019."""
    found = tree.get("iteration", tree.get("total_iters"))
    return None if found is None else _count(found, "iteration", where)


def check_iteration(step: int, told: int | None, where: str) -> None:
    """Refuse a file of another iteration than the folder that it lies in. step: of the folder; a
    release (0) may be of any iteration."""
    if step and told is not None and told != step:
        raise ArtifactError(
            f"{where}: says iteration {told}, and lies in the folder of iteration {step}; the "
            "folder was renamed, or the file is of another save. Put back what belongs there, or "
            f"name the folder iter_{told:07d} (and in the tracker {told}) if all files say so"
        )


def samples_in(args: Mapping[str, Any], where: str) -> int:
    """`consumed_train_samples`; 0 where the arguments do not say."""
    found = args.get("consumed_train_samples")
    return 0 if found is None else _count(found, "consumed_train_samples", where)


def schedule_in(tree: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """State of the schedules of learning rate and weight decay, if there is one; of the form that
    ours can go on with, every value of it is checked."""
    found = tree.get("opt_param_scheduler", tree.get("lr_scheduler"))
    if not isinstance(found, Mapping):
        return None
    for name in sorted(SCHEDULER) if found.keys() >= SCHEDULER else ():
        value = found[name]
        if name == "num_steps":
            _count(value, name, where)
        elif not (_is_word(value) if name in STYLES else _is_amount(value)):
            raise ArtifactError(
                f"{where}: {name} of its schedule is {shown(value)}, which no schedule can be"
            )
    return found


def _count(value: Any, name: str, where: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ArtifactError(f"{where}: {name} is {shown(value)}, wanted a number from 0 on")
    return int(value)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) < 100


def _is_amount(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return 0 <= value <= MAX_COUNT and math.isfinite(value)
