"""Weights in 8 bits on their way to other ranks: half the bytes of bf16 (--fp8-param-gather).

They are sent as the numbers that products cast them to, from bf16, and decoded to bf16 where they
arrive. A product that casts what was decoded multiplies the same values, so no result changes. With
one scale for a tensor, its largest magnitude is decoded to itself, and every other number to within
2^-9 relative error; e4m3 neighbours are at least 2^-4 apart, so it is cast to the same value again.
Scales of blocks are powers of two, and decoding is exact. The matrices of experts, stacked in one
weight, have scales of their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainyard.fp8.cast import FORWARD, power_of_two_scale, scale_of
from trainyard.fp8.recipe import TILE, Recipe
from trainyard.parallel.data.buffers import Bucket, BufferSlot

LIMIT = torch.finfo(FORWARD).max


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Weights that products cast to 8 bits."""

    names: Collection[str]
    scaling: Recipe
    """One that survives decoding."""


class Fp8Codec:
    """Encodes this rank's pieces of buckets and decodes whole buckets. After each update, `measure`
    comes first."""

    def __init__(self, scaling: Recipe, group: ProcessGroup) -> None:
        """group: the ranks that have the pieces of each bucket."""
        self._scaling, self._group = scaling, group
        self._scales: dict[BufferSlot, Tensor] = {}
        """(rows, columns) of the parts that have a scale each."""

    @torch.no_grad()
    def measure(self, buckets: Iterable[Bucket]) -> None:
        """Find the scales, which depend on the pieces of all ranks."""
        found = {
            place: self._maxima(bucket, place)
            for bucket in buckets
            if bucket.is_sent_in_8_bits
            for place in bucket.places
        }
        if not found:
            return
        largest = torch.cat([maxima.flatten() for maxima in found.values()])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        scales = (scale_of if self._scaling == "tensorwise" else power_of_two_scale)(
            largest, FORWARD
        )
        parts = scales.split([maxima.numel() for maxima in found.values()])
        self._scales = {
            place: part.view(maxima.shape)
            for (place, maxima), part in zip(found.items(), parts, strict=True)
        }

    def _maxima(self, bucket: Bucket, place: BufferSlot) -> Tensor:
        """Maxima of the parts of a weight, over the numbers that this rank has; fp32, others 0."""
        shape = place.member.parameter.shape
        height, width = self._part_size(shape)
        grid = (math.prod(shape[:-1]) // height, shape[-1] // width)
        found = torch.zeros(grid, device=bucket.params.device)
        begin, end = bucket.own_span(place)
        if begin < end:
            numbers = bucket.params[place.start + begin : place.start + end]
            parts, first, _ = self._parts(numbers, begin, shape)
            found[first : first + parts.shape[0]] = parts.abs().amax((1, 3))
        return found

    @torch.no_grad()
    def encode(self, bucket: Bucket) -> Tensor:
        """This rank's piece, a byte for each number."""
        message = torch.zeros_like(bucket.own_params, dtype=torch.uint8)
        sent = message.view(FORWARD)
        for place in bucket.places:
            begin, end = bucket.own_span(place)
            if begin == end:
                continue
            start = place.start - bucket.own_start
            numbers = bucket.own_params[start + begin : start + end]
            parts, first, skipped = self._parts(numbers, begin, place.member.parameter.shape)
            scale = self._scales[place][first : first + parts.shape[0], None, :, None]
            cast = parts.float().mul_(scale).clamp_(-LIMIT, LIMIT).to(FORWARD)
            sent[start + begin : start + end] = cast.view(-1)[skipped : skipped + end - begin]
        return message

    @torch.no_grad()
    def decode(self, bucket: Bucket, message: Tensor) -> None:
        """Write the weights of a bucket from the messages of all its ranks, one after another."""
        sent = message.view(FORWARD)
        for place in bucket.places:
            shape = place.member.parameter.shape
            parts, *_ = self._parts(sent[place.start : place.stop], 0, shape)
            inverse = self._scales[place].reciprocal()[:, None, :, None]
            bucket.params[place.start : place.stop] = parts.float().mul_(inverse).view(-1)

    def _parts(self, numbers: Tensor, begin: int, shape: torch.Size) -> tuple[Tensor, int, int]:
        """Numbers from `begin` on of a weight of this shape as (rows of parts, height, columns of
        parts, width), filled up with zeros to whole rows of parts; the first of these rows, and how
        many zeros come first."""
        if self._scaling == "tensorwise" and len(shape) == 2:
            return numbers.view(1, -1, 1, 1), 0, 0
        height, width = self._part_size(shape)
        band = height * shape[-1]
        first, last = begin // band, -(-(begin + numbers.numel()) // band)
        skipped, size = begin - first * band, (last - first) * band
        if numbers.numel() < size:
            filled = numbers.new_zeros(size)
            filled[skipped : skipped + numbers.numel()] = numbers
            numbers = filled
        return numbers.view(last - first, height, shape[-1] // width, width), first, skipped

    def _part_size(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns that have a scale: of a matrix, or of a block of one."""
        return (shape[-2], shape[-1]) if self._scaling == "tensorwise" else (TILE, TILE)
