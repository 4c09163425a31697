"""The flash-attn package over keys and values in blocks, in place of `kernels.paged`: what each of
its generations takes, and how it is called.

They differ in how they are told tables and lengths. Sizes are those of `paged`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainyard.attention.flash import output_of, package_of, window_of
from trainyard.attention.masks import NO_BOUND
from trainyard.attention.select import FLASH_HEAD_DIM, HALVES, Device

BLOCK_MULTIPLE = 256
"""Of the tokens of a block, for generation 2."""
BLACKWELL_HEAD_DIM = 128
"""Most channels on Blackwell but for 256."""


class BlockNeeds(NamedTuple):
    """What the layers of a model and their cache ask of the package."""

    dtype: str
    """Of queries: bfloat16."""
    kv_dtype: str
    block_size: int
    width: int
    """Channels of a key."""
    value_width: int
    sink: bool


def problem_of_blocks(device: Device, needs: BlockNeeds) -> str | None:
    """Why the installed generation cannot attend to blocks on a device; None if it can."""
    version, capability = device.flash_attn, device.capability
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device.type}"
    if not version:
        return "no flash-attn is installed that this device can run"
    name = f"flash-attn {version}"
    if version == 4 and capability >= (12, 0):
        return f"{name} has no blocks of keys on compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"{name} needs compute capability 8.0 or more, not {capability[0]}.{capability[1]}"
    if needs.dtype not in HALVES:
        return f"{name} computes in bf16 and fp16 (--bf16, --fp16), not {needs.dtype}"
    if needs.kv_dtype != needs.dtype:
        return f"{name} takes keys in {needs.dtype}, not in {needs.kv_dtype} (--kv-cache-dtype)"
    if needs.value_width != needs.width:
        return f"{name} takes values as wide as keys, not {needs.value_width} and {needs.width}"
    if needs.width > FLASH_HEAD_DIM or needs.width % 8 or not _fits_blackwell(device, needs):
        return f"{name} has no heads of {needs.width} channels on this device"
    if version == 2 and needs.block_size % BLOCK_MULTIPLE:
        return (
            f"{name} takes blocks of a multiple of {BLOCK_MULTIPLE} tokens, not {needs.block_size} "
            "(--inference-dynamic-batching-block-size)"
        )
    if version != 4 and needs.sink:
        return f"{name} has no sinks (--softmax-type)"
    return None


def _fits_blackwell(device: Device, needs: BlockNeeds) -> bool:
    is_bound = device.flash_attn == 4 and device.capability >= (10, 0)
    return not is_bound or needs.width <= BLACKWELL_HEAD_DIM or needs.width == FLASH_HEAD_DIM


def flash_over_blocks(
    version: int,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    *,
    most_new: int,
    most_keys: int,
    scale: float,
    sink: Tensor | None,
    left: int,
) -> Tensor:
    """`paged.paged_attention` by a generation of the package.

    sequences: tables, starts and lengths of a `PagedLayout`. left: keys of the window, or
    `NO_BOUND`."""
    package = package_of(version)
    tables, starts, lengths = (x.to(torch.int32) for x in sequences)
    window = (NO_BOUND, NO_BOUND) if left == NO_BOUND else (left, 0)
    given = {
        "cu_seqlens_q": starts,
        "max_seqlen_q": most_new,
        "softmax_scale": scale,
        "causal": True,
        "window_size": window_of(version, window),
    }
    if version == 4:
        given |= {"seqused_k": lengths, "max_seqlen_k": most_keys, "learnable_sink": sink}
        out = package.flash_attn_varlen_func(q, keys, values, page_table=tables, **given)
    elif version == 3:
        given |= {"cache_seqlens": lengths}
        out = package.flash_attn_with_kvcache(q, keys, values, page_table=tables, **given)
    else:
        ends = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        given |= {"cu_seqlens_k": ends, "max_seqlen_k": most_keys}
        out = package.flash_attn_varlen_func(q, keys, values, block_table=tables, **given)
    return output_of(out)
