"""Keys and values in the type in which a cache keeps them, which may have 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_as(dtype: torch.dtype, new: Tensor) -> Tensor:
    """New keys or values in the type of a cache. Numbers that E4M3 does not reach become its
    largest."""
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        new = new.clamp(-largest, largest)
    return new.to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Numbers of 8 bits as integers, since torch indexes no E4M3 on some devices; others as they
    are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
