"""Attention in a step of generation, from the product of a layer's QKV matrix to the input of its
projection: rotates queries and keys, writes the new key and value to the cache, and attends.

A program takes the queries of one key head of a row, and a part of the row's keys. The new key is
where it begins, so none reads what another writes. The last of the parts of a row to be done puts
them together. r rows, n query heads, g key and value heads, d head channels, T capacity, p parts
of the keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.decode_product import LARGEST
from trainyard.kernels.dependent_launch import begin, prefetch

LEAST_QUERIES = 16
"""Of a program; fewer are padded."""
MOST_PARTS = 32
"""Of the keys of a row."""


class Tile(NamedTuple):
    """Sizes of a program."""

    programs: int
    """That keep the processors of a large GPU busy."""
    keys: int
    """That are read at a time."""
    warps: int
    stages: int
    """Reads under way."""


def tile_of(rows: int, kept: torch.dtype) -> Tile:
    """The fastest of those tried on an H200. kept: type of keys and values."""
    is_wide = kept.itemsize > 1
    if rows > 16:
        return Tile(264, 32, 2, 4) if is_wide else Tile(264, 64, 2, 3)
    if rows > 2 and is_wide:
        return Tile(528, 64, 4, 3)
    return Tile(264, 128, 4, 3)


@triton.jit
def _rotated(at, cos, sin, channel, mask, width: tl.constexpr):
    """Heads whose channels are at `at` + channel, rotated, fp32."""
    own = tl.load(at + channel, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(at + (channel ^ (width // 2)), mask=mask, other=0.0).to(tl.float32)
    return own * cos + tl.where(channel < width // 2, -other, other) * sin


@triton.jit(do_not_specialize=["num_rows"])
def _attend(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    lengths_ptr,
    out_ptr,
    out_scale_ptr,
    parts_ptr,
    stats_ptr,
    done_ptr,
    scale,
    row_stride,
    head_stride,
    num_rows,
    groups: tl.constexpr,
    group_size: tl.constexpr,
    width: tl.constexpr,
    queries: tl.constexpr,
    keys_at_once: tl.constexpr,
    stages: tl.constexpr,
    num_parts: tl.constexpr,
    rotates: tl.constexpr,
    casts: tl.constexpr,
    opaque: tl.constexpr,
    precision: tl.constexpr,
    dependent: tl.constexpr,
):
    row, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, num_parts), keys_at_once) * keys_at_once
    from_key = part * share
    to_key = tl.minimum(from_key + share, length)
    keys_at = keys_ptr + row * row_stride + group * head_stride
    values_at = values_ptr + row * row_stride + group * head_stride
    key, channel = tl.arange(0, keys_at_once), tl.arange(0, width)
    if dependent:
        if from_key < to_key:
            prefetch(keys_at + (from_key + key) * width)
            prefetch(values_at + (from_key + key) * width)
        begin()

    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    query = tl.arange(0, queries)
    is_query = query < group_size
    head_at = qkv_ptr + (row * groups + group) * (group_size + 2) * width
    query_at = head_at + query[:, None] * width
    key_at = head_at + group_size * width
    if rotates:
        cos = tl.load(cos_ptr + row * width + channel).to(tl.float32)
        sin = tl.load(sin_ptr + row * width + channel).to(tl.float32)
        q = _rotated(
            query_at, cos[None, :], sin[None, :], channel[None, :], is_query[:, None], width
        )
        new_key = _rotated(key_at, cos, sin, channel, channel < width, width)
    else:
        q = tl.load(query_at + channel[None, :], mask=is_query[:, None], other=0.0).to(tl.float32)
        new_key = tl.load(key_at + channel).to(tl.float32)
    q = q.to(dtype)
    kept: tl.constexpr = keys_ptr.dtype.element_ty
    # Widened to 16 bits: a GPU turns E4M3 into fp16 in one instruction, into bf16 in three.
    inner: tl.constexpr = tl.float16 if kept.is_fp8() else dtype
    new_key = new_key.to(dtype).to(kept)
    new_value = tl.load(key_at + width + channel).to(kept)

    factor = scale * 1.44269504
    highest = tl.full((queries,), float("-inf"), tl.float32)
    total = tl.zeros((queries,), tl.float32)
    sums = tl.zeros((queries, width), tl.float32)
    if part == 0:
        tl.store(keys_at + length * width + channel, new_key)
        tl.store(values_at + length * width + channel, new_value)
        highest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * factor
        total += 1.0
        sums += new_value.to(tl.float32)[None, :]
    for first in tl.range(from_key, to_key, keys_at_once, num_stages=stages):
        is_key = first + key < length
        k = tl.load(
            keys_at + (first + key)[None, :] * width + channel[:, None],
            mask=is_key[None, :],
            other=0.0,
        )
        scores = tl.dot(q.to(inner), k.to(inner), input_precision=precision) * factor
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            values_at + (first + key)[:, None] * width + channel[None, :],
            mask=is_key[:, None],
            other=0.0,
        )
        v = v.to(inner)
        if opaque:  # else it is read byte by byte for the product
            v = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2
            )
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(inner), v, input_precision=precision)
        highest = higher

    place = (row * groups + group) * group_size + query
    if num_parts > 1:
        heads = num_rows * groups * group_size
        at = part * heads + place
        is_out = is_query[:, None] & (channel < width)[None, :]
        tl.store(parts_ptr + at[:, None] * width + channel[None, :], sums, mask=is_out)
        tl.store(stats_ptr + at * 2, highest, mask=is_query)
        tl.store(stats_ptr + at * 2 + 1, total, mask=is_query)
        tl.debug_barrier()
        done = done_ptr + row * groups + group
        if tl.atomic_add(done, 1, sem="acq_rel") != num_parts - 1:
            return
        tl.store(done, 0)
        highest = tl.load(stats_ptr + place * 2, mask=is_query, other=0.0)
        total = tl.load(stats_ptr + place * 2 + 1, mask=is_query, other=1.0)
        sums = tl.load(
            parts_ptr + place[:, None] * width + channel[None, :], mask=is_out, other=0.0
        )
        for number in range(1, num_parts):
            at = number * heads + place
            other = tl.load(stats_ptr + at * 2, mask=is_query, other=0.0)
            count = tl.load(stats_ptr + at * 2 + 1, mask=is_query, other=0.0)
            part_sums = tl.load(
                parts_ptr + at[:, None] * width + channel[None, :], mask=is_out, other=0.0
            )
            higher = tl.maximum(highest, other)
            shrink, grow = tl.exp2(highest - higher), tl.exp2(other - higher)
            total = total * shrink + count * grow
            sums = sums * shrink[:, None] + part_sums * grow[:, None]
            highest = higher
    out = sums / total[:, None]
    if casts:
        out = tl.where(is_query[:, None], out, 0.0).to(dtype).to(tl.float32)
        out_scale = tl.maximum(tl.max(tl.max(tl.abs(out), 1), 0), 1e-12) / LARGEST
        tl.store(out_scale_ptr + group * num_rows + row, out_scale)
        out = out / out_scale
    tl.store(
        out_ptr + place[:, None] * width + channel[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None],
    )


class DecodeAttention:
    """The kernel with the memory in which its programs meet; for one size of a batch."""

    def __init__(self, rows: int, heads: int, keys: Tensor) -> None:
        """keys: of the cache, (r, g, T, d), its own dtype and device."""
        groups, capacity, width = keys.shape[1:]
        self._tile = tile_of(rows, keys.dtype)
        wanted = min(self._tile.programs / (rows * groups), capacity / self._tile.keys, MOST_PARTS)
        self.num_parts = 1 << int(math.log2(max(wanted, 1)))
        shape = (self.num_parts, rows, heads, width)
        self._parts = torch.empty(shape, dtype=torch.float32, device=keys.device)
        self._stats = torch.empty((*shape[:3], 2), dtype=torch.float32, device=keys.device)
        self._done = torch.zeros(rows * groups, dtype=torch.int32, device=keys.device)

    def __call__(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        out: Tensor,
        *,
        scale: float,
        out_scale: Tensor | None = None,
        dependent: bool = False,
    ) -> None:
        """Write the attention of a new token of each row to `out`, (r, n d), and its key and value
        to the cache.

        qkv: (r, g (n / g + 2) d), as `models.attention` orders it; rotary: cosines and sines, (r,
        d) each; keys, values: (r, g, T, d) of qkv's type or E4M3; lengths: (r), tokens in the cache
        so far. out_scale: (g, r) fp32, computed here for an `out` of E4M3. All contiguous."""
        rows, groups, _, width = keys.shape
        group_size = qkv.shape[1] // (groups * width) - 2
        cos, sin = (qkv, qkv) if rotary is None else rotary
        _attend[(rows, groups, self.num_parts)](
            *(qkv, cos, sin, keys, values, lengths, out),
            *(self._done if out_scale is None else out_scale, self._parts, self._stats, self._done),
            *(scale, *keys.stride()[:2], rows),
            groups=groups,
            group_size=group_size,
            width=width,
            queries=max(triton.next_power_of_2(group_size), LEAST_QUERIES),
            keys_at_once=self._tile.keys,
            stages=self._tile.stages,
            num_parts=self.num_parts,
            rotates=rotary is not None,
            casts=out_scale is not None,
            opaque=dependent and keys.dtype != qkv.dtype,
            precision="ieee" if qkv.dtype == torch.float32 else "tf32",
            dependent=dependent,
            num_warps=self._tile.warps,
            **({"launch_pdl": True} if dependent else {}),
        )
