"""The scale of the loss of an fp16 run of Megatron-LM, beside the states of its optimizer:

    "grad_scaler": {"scale": tensor of one fp32, "growth_tracker", "hysteresis_tracker"}

It is {} where the scale is constant, and missing or None in bf16. Values are those of its
DynamicGradScaler, which ours has the names and the rule of. Without them a run that goes on begins
at --initial-loss-scale, and overflows until that has come down."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainyard.artifacts.strict_json import MAX_COUNT, shown
from trainyard.conversion.torch_save.pickles import TensorRef
from trainyard.errors import ArtifactError

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
