"""The training state in Megatron-LM's files: iteration, samples, schedules, tokens, loss scale.

A resumed run takes its data and learning rate from these numbers, so they must agree, and values
that no run writes are refused. The loss scale of an fp16 run is in the optimizer's document:

    "grad_scaler": {"scale": tensor of one fp32, "growth_tracker", "hysteresis_tracker"}

It is {} for a constant scale, and missing or None in bf16. trainyard's scaler has the same values
and rule. Without them a resumed run starts at --initial-loss-scale, and overflows until the scale
has come down."""

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
"""A schedule's values that are strings."""


def iteration_in(tree: Mapping[str, Any], where: str) -> int | None:
    """The iteration in a file; None if it has none, like some files of 2019."""
    found = tree.get("iteration", tree.get("total_iters"))
    return None if found is None else _count(found, "iteration", where)


def check_iteration(step: int, stated: int | None, where: str) -> None:
    """Refuse a file of another iteration than its folder. step: of the folder; a release (0) may
    have any iteration."""
    if step and stated is not None and stated != step:
        raise ArtifactError(
            f"{where}: has iteration {stated}, but is in the folder of iteration {step}; the "
            "folder was renamed, or the file is from another save. Restore the right file or, if "
            f"all files have {stated}, rename the folder to iter_{stated:07d} (and write {stated} "
            "into the tracker)"
        )


def samples_in(args: Mapping[str, Any], where: str) -> int:
    """`consumed_train_samples`; 0 if the arguments do not have it."""
    found = args.get("consumed_train_samples")
    return 0 if found is None else _count(found, "consumed_train_samples", where)


def schedule_in(tree: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """State of the schedules of learning rate and weight decay, or None. Every value is checked if
    trainyard can resume it."""
    found = tree.get("opt_param_scheduler", tree.get("lr_scheduler"))
    if not isinstance(found, Mapping):
        return None
    for name in sorted(SCHEDULER) if found.keys() >= SCHEDULER else ():
        value = found[name]
        if name == "num_steps":
            _count(value, name, where)
        elif not (_is_word(value) if name in STYLES else _is_amount(value)):
            raise ArtifactError(
                f"{where}: {name} of its schedule is {shown(value)}, which no schedule can have"
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
    """Tokens of the tokenizer: `true_vocab_size` of converters, `vocab_size` of the run, otherwise
    the `padded` rows of the embedding.

    For other tokenizers the arguments keep only the path of their files, which are elsewhere."""
    for name in ("true_vocab_size", "vocab_size"):
        value = args.get(name)
        if type(value) is not int:
            continue
        if name == "vocab_size" and args.get("tokenizer_type") in ONE_MORE:
            value = min(value + 1, padded)  # a release that adds none: one padding row counts
        if 0 < value <= padded:
            return value
    return padded


# --- the loss scale -----------------------------------------------------------------------------


log = logging.getLogger(__name__)

KEY = "grad_scaler"
TRACKERS = ("growth_tracker", "hysteresis_tracker")

Scaler = dict[str, Any]
"""The loss scale, as in `state.json`: {"scale", "growth_tracker", "hysteresis_tracker"}, or {}."""


def scaler_in(document: Any, read: Callable[[TensorRef], Tensor], where: str) -> Scaler:
    """The loss scale in the `optimizer` of a file; {} without one. read: reads the values of a
    tensor. Raises ArtifactError for an invalid one."""
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
                f"{where}: {name} of its {KEY} is {shown(value)}, which no loss scale has; the "
                "file is damaged"
            )
    return values | {"scale": float(values["scale"])}


def warn_without(scaler: Scaler, dtype: str, args: Mapping[str, Any], url: str) -> None:
    """Warn that the loss scale of an fp16 run is unknown. dtype: of its weights."""
    if dtype == "F16" and not scaler and not args.get("loss_scale"):
        log.warning(
            "%s is of an fp16 run, but its optimizer has no loss scale (%s): a run that resumes "
            "from it starts at --initial-loss-scale and skips steps until the scale has come "
            "down; set it to the scale in the last log lines",
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
    """Hysteresis continues below 0 while steps overflow."""
    return type(value) is int and -MAX_COUNT <= value <= MAX_COUNT
