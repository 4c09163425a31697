"""How far a run of Megatron-LM had come, as its files tell it: iteration, samples, schedules.

A run that goes on from here takes its data and its learning rate by these numbers, so they must
agree with each other, and one that no run writes is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainyard.artifacts.strict_json import MAX_COUNT, shown
from trainyard.conversion.torch_save.pickles import TensorRef
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


# --- tokens -----------------------------------------------------------------------------------


ONE_MORE = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers that add an end of document to --vocab-size, up to core 0.15."""

EXACT = ("TikTokenizer",)
"""Tokenizers that have as many tokens as --vocab-size says."""


def tokens_of(args: Mapping[str, Any], padded: int) -> int:
    """Tokens where the arguments say so: `true_vocab_size` of converters, `vocab_size` of the run;
    else the rows of the embedding, which are `padded`.

    Of other kinds of tokenizers the arguments keep the path of their files, which lie elsewhere."""
    for name in ("true_vocab_size", "vocab_size"):
        value = args.get(name)
        if type(value) is not int:
            continue
        if name == "vocab_size" and args.get("tokenizer_type") in ONE_MORE:
            value = min(value + 1, padded)  # where it is not one more, a row is spare
        if 0 < value <= padded:
            return value
    return padded


# --- the scale of the loss --------------------------------------------------------------------


log = logging.getLogger(__name__)

KEY = "grad_scaler"
TRACKERS = ("growth_tracker", "hysteresis_tracker")

Scaler = dict[str, Any]
"""As `state.json` keeps it: {"scale", "growth_tracker", "hysteresis_tracker"}, or {}."""


def scaler_in(document: Any, read: Callable[[TensorRef], Tensor], where: str) -> Scaler:
    """That of the `optimizer` of a file; {} where it keeps none. read: gives the values of a
    tensor. Raises ArtifactError for one that no run can go on with."""
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    found = document.get(KEY) if isinstance(document, Mapping) else None
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{where}: its {KEY} is {shown(found)}, wanted a table")
    values = {name: _number(found.get(name), read) for name in ("scale", *TRACKERS)}
    for name, value in values.items():
        if not (_is_scale(value) if name == "scale" else _is_count(value)):
            raise ArtifactError(
                f"{where}: {name} of its {KEY} is {shown(value)}, which no scale of the loss has; "
                "the file is damaged"
            )
    return values | {"scale": float(values["scale"])}


def warn_without(scaler: Scaler, dtype: str, args: Mapping[str, Any], url: str) -> None:
    """Say that the scale of an fp16 run is not known. dtype: of its weights."""
    if dtype == "F16" and not scaler and not args.get("loss_scale"):
        log.warning(
            "%s is of an fp16 run, and its optimizer keeps no scale of the loss (%s): a run that "
            "goes on from it begins at --initial-loss-scale, and skips steps until that has come "
            "down; give it there the scale of the last log lines",
            *(url, KEY),
        )


def _number(value: Any, read: Callable[[TensorRef], Tensor]) -> Any:
    """The value of a tensor of one element; anything else as it is."""
    return read(value).item() if isinstance(value, TensorRef) and value.numel == 1 else value


def _is_scale(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    return 0 < value < float(MAX_COUNT) ** 2 and math.isfinite(value)


def _is_count(value: Any) -> bool:
    """Hysteresis goes on below 0 while steps overflow."""
    return type(value) is int and -MAX_COUNT <= value <= MAX_COUNT
