"""Joules that a GPU has drawn, by the counter of the driver (package nvidia-ml-py)."""

from __future__ import annotations

import importlib.util
import math
import os


def joules() -> float:
    """Of the first GPU since the driver was loaded. nan where nothing counts them, and where
    CUDA_VISIBLE_DEVICES, which the counter ignores, makes another GPU the first."""
    is_other = os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "0"
    if is_other or importlib.util.find_spec("pynvml") is None:
        return math.nan
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    finally:
        pynvml.nvmlShutdown()
