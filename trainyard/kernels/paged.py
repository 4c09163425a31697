"""FlashAttention of new tokens to keys and values in blocks, which it reads in place, instead of
`attention.paged.gathered_attention`.

A program takes a tile of the new tokens of one sequence, with all query heads of one key head, so
that keys are read once for the group. Where there are few programs, the keys of a sequence are
shared out among several of them, and a second kernel puts the parts together (Flash-Decoding). A
tile of several tokens and a single one are the same kernel.

T new tokens, R sequences, n query heads, g key and value heads, d head channels, d_v channels of a
value, N blocks, B tokens of a block, M blocks of the longest sequence, p parts of the keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_WINDOW = -1
PROGRAMS, MOST_PARTS = 264, 32
"""Programs that keep the processors of a large GPU busy, two for each; parts at most."""

BYTES_OF_KEYS = 2**14
"""That are read at a time, so that keys and values of three rounds fit in shared memory."""


class Tile(NamedTuple):
    """Sizes of a program."""

    rows: int
    """Tokens x query heads of a group, at least 16, the least of a matrix product."""
    keys: int
    """That are read at a time, at most."""
    warps: int
    stages: int


DECODE = Tile(16, 64, 4, 3)
ONE_BLOCK = Tile(16, 64, 4, 4)
"""`DECODE` where the keys of a sequence are beside each other."""
MIXED = Tile(64, 64, 4, 2)
PREFILL = Tile(128, 64, 8, 2)


@triton.jit
def _sequence_of(starts_ptr, tile, num_sequences, tile_tokens: tl.constexpr):
    """The sequence of a tile: each has a tile for every `tile_tokens` tokens begun, and at most one
    more, so its first tile is starts // tile_tokens + its number."""
    low: tl.int32 = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle) // tile_tokens + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    sink_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    num_sequences: tl.int32,
    table_width,
    q_token_stride,
    q_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    num_tokens,
    window: tl.constexpr,
    has_sink: tl.constexpr,
    groups: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys_at_once: tl.constexpr,
    padded_width: tl.constexpr,
    padded_value_width: tl.constexpr,
    num_parts: tl.constexpr,
    one_block: tl.constexpr,
    precision: tl.constexpr,
):
    tile, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile_tokens: tl.constexpr = rows // group_size
    sequence = _sequence_of(starts_ptr, tile, num_sequences, tile_tokens)
    begin = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - begin
    first = (tile - (begin // tile_tokens + sequence)) * tile_tokens
    if first >= count:
        return
    length = tl.load(lengths_ptr + sequence)

    row = tl.arange(0, rows)
    token = first + row // group_size
    is_row = (row < tile_tokens * group_size) & (token < count)
    position = length - count + token
    head = group * group_size + row % group_size
    channel = tl.arange(0, padded_width)
    value_channel = tl.arange(0, padded_value_width)
    q = tl.load(
        q_ptr
        + ((begin + token) * q_token_stride + head * q_head_stride)[:, None]
        + channel[None, :],
        mask=is_row[:, None] & (channel < width)[None, :],
        other=0.0,
    )

    # A GPU turns E4M3 into fp16 in one instruction, into bf16 in three.
    is_fast: tl.constexpr = keys_ptr.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16
    inner: tl.constexpr = tl.float16 if is_fast else q.dtype
    q = q.to(inner)

    # Keys that any row of the tile sees, and of these the part of this program.
    last = tl.minimum(length - count + first + tile_tokens, length)
    low = last * 0
    if window != -1:
        low = tl.maximum(length - count + first - window, 0) // keys_at_once * keys_at_once
    share = tl.cdiv(tl.cdiv(last - low, num_parts), keys_at_once) * keys_at_once
    from_key = low + part * share
    to_key = tl.minimum(from_key + share, last)

    highest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    if has_sink:
        score = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.44269504
        highest = tl.where(part == 0, score, highest)
        total = tl.where(part == 0, total + 1.0, total)
    sums = tl.zeros((rows, padded_value_width), tl.float32)
    table = tables_ptr + sequence * table_width
    only_block = tl.load(table)
    for key_begin in range(from_key, to_key, keys_at_once):
        key = key_begin + tl.arange(0, keys_at_once)
        is_key = key < last
        if one_block:
            block = only_block + key * 0
        elif block_size % keys_at_once == 0:
            block = tl.load(table + key_begin // block_size) + key * 0
        else:
            block = tl.load(table + key // block_size, mask=is_key, other=0)
        place = key % block_size
        k = tl.load(
            keys_ptr
            + (block * key_block_stride + place * key_token_stride)[None, :]
            + group * key_head_stride
            + channel[:, None],
            mask=is_key[None, :] & (channel < width)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(inner), input_precision=precision) * (scale * 1.44269504)
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if window != -1:
            seen = seen & (position[:, None] - key[None, :] <= window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet has no highest score.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            values_ptr
            + (block * value_block_stride + place * value_token_stride)[:, None]
            + group * value_head_stride
            + value_channel[None, :],
            mask=is_key[:, None] & (value_channel < value_width)[None, :],
            other=0.0,
        )
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(inner), v.to(inner), input_precision=precision)
        highest = higher

    place = (begin + token) * (groups * group_size) + head
    is_out = is_row[:, None] & (value_channel < value_width)[None, :]
    if num_parts == 1:
        tl.store(
            out_ptr + place[:, None] * value_width + value_channel[None, :],
            (sums / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_out,
        )
    else:
        place += part * num_tokens * (groups * group_size)
        tl.store(
            parts_ptr + place[:, None] * value_width + value_channel[None, :], sums, mask=is_out
        )
        tl.store(stats_ptr + place * 2, highest, mask=is_row)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_row)


@triton.jit
def _put_together(
    parts_ptr,
    stats_ptr,
    out_ptr,
    num_rows,
    value_width: tl.constexpr,
    padded_value_width: tl.constexpr,
    num_parts: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, padded_value_width)
    inside = channel < value_width
    part = tl.arange(0, num_parts)
    highest = tl.load(stats_ptr + (part * num_rows + row) * 2)
    total = tl.load(stats_ptr + (part * num_rows + row) * 2 + 1)
    factor = tl.exp2(highest - tl.max(highest, 0))
    sums = tl.load(
        parts_ptr + (part * num_rows + row)[:, None] * value_width + channel[None, :],
        mask=inside[None, :],
        other=0.0,
    )
    out = tl.sum(sums * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out_ptr + row * value_width + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_kernel(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    most_new: int,
    most_keys: int,
    scale: float,
    sink: Tensor | None = None,
    window: int = NO_WINDOW,
) -> Tensor:
    """Causal attention of the new tokens of each sequence to all of its keys.

    q: (T, n, d); keys: (N, B, g, d); values: (N, B, g, d_v), of q's type or E4M3; tables: (R, M)
    int64; starts: (R + 1) int64, where the tokens of each sequence begin; lengths: (R) int64, its
    keys with the new ones. most_new, most_keys: new tokens and keys of a sequence at most. sink:
    (n). window: keys to the left. Returns (T, n, d_v). Channels are beside each other in memory."""
    num_tokens, heads, width = q.shape
    block_size, groups, value_width = keys.shape[1], keys.shape[2], values.shape[3]
    group_size, num_sequences = heads // groups, len(lengths)
    tile = tile_of(most_new, num_tokens / num_sequences, group_size)
    one_block = tables.shape[1] == 1
    if one_block and tile == DECODE:
        tile = ONE_BLOCK
    tiles = num_tokens // (tile.rows // group_size) + num_sequences
    padded_width = max(triton.next_power_of_2(width), 16)
    keys_at_once = min(tile.keys, max(BYTES_OF_KEYS // (padded_width * q.element_size()), 16))
    num_parts = 1
    if most_new == 1:
        busy, rounds = (2 * PROGRAMS, 1) if one_block else (PROGRAMS, 4)
        num_parts = parts_of(busy / (tiles * groups), most_keys / (rounds * keys_at_once))
    out = q.new_empty(num_tokens, heads, value_width)
    parts = stats = out
    if num_parts > 1:
        parts = out.new_empty((num_parts, *out.shape), dtype=torch.float32)
        stats = parts.new_empty(num_parts, num_tokens, heads, 2)
    padded_value_width = max(triton.next_power_of_2(value_width), 16)
    _attend[(tiles, groups, num_parts)](
        *(q, keys, values, tables, starts, lengths, out if sink is None else sink),
        *(out, parts, stats, scale, num_sequences, tables.shape[1], *q.stride()[:2]),
        *(*keys.stride()[:3], *values.stride()[:3], num_tokens),
        window=window,
        has_sink=sink is not None,
        groups=groups,
        group_size=group_size,
        block_size=block_size,
        width=width,
        value_width=value_width,
        rows=tile.rows,
        keys_at_once=keys_at_once,
        padded_width=padded_width,
        padded_value_width=padded_value_width,
        num_parts=num_parts,
        one_block=one_block,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if num_parts > 1:
        _put_together[(num_tokens * heads,)](
            *(parts, stats, out, num_tokens * heads),
            value_width=value_width,
            padded_value_width=padded_value_width,
            num_parts=num_parts,
            num_warps=4,
        )
    return out


def tile_of(most_new: int, mean_new: float, group_size: int) -> Tile:
    """The sizes of programs for this many new tokens of a sequence, at most and on average."""
    if most_new * group_size <= DECODE.rows:
        return DECODE
    tile = PREFILL if mean_new * group_size >= PREFILL.rows else MIXED
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(group_size)))


def parts_of(wanted: float, most: float) -> int:
    """Parts of the keys, a power of 2: what keeps the GPU busy, with some keys each."""
    return 1 << int(math.log2(max(min(wanted, most, MOST_PARTS), 1)))
