"""Digests of blocks of tensors, so that a reader of some bytes of a file can check them.

A block is as many whole rows of a tensor as fit in `BLOCK_BYTES`, counted from its first byte; a
row that does not fit is cut in the same way. The digests of a tensor are one string, for each block
the first 32 hexadecimal digits of its blake3 digest."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from trainyard.artifacts.backends.fast_copy import Fill
from trainyard.artifacts.digest import digest_bytes, hasher
from trainyard.checkpoint.safetensors.header import ITEM_BYTES, Extent, TensorSpec

BLOCK_BYTES = 1 << 20
"""Little to read for one row of a tensor, and much beside its digest."""

DIGITS = 32

CACHED_BLOCKS = 16

Digests: TypeAlias = Mapping[str, str]
"""Digests of the blocks of each tensor of a file, by its key there."""


def block_bytes(spec: TensorSpec) -> int:
    """Bytes of each block of a tensor but the last."""
    strides = [math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    rows = (stride * ITEM_BYTES[spec.dtype] for stride in strides)
    row = next((row for row in rows if 0 < row <= BLOCK_BYTES), BLOCK_BYTES)
    return BLOCK_BYTES // row * row


def num_digits(spec: TensorSpec) -> int:
    """Length of the digests of a tensor."""
    return -(-spec.size_bytes // block_bytes(spec)) * DIGITS


class BlockDigests:
    """Computes the digests of the tensors of a file, whose bytes pass by in order."""

    def __init__(
        self, header_bytes: int, specs: Mapping[str, TensorSpec], known: Digests | None = None
    ) -> None:
        """specs: in the order of the file. known: digests that need not be computed."""
        self.by_key = dict.fromkeys(specs, "") | dict(known or {})
        self._blocks = self._planned(header_bytes, specs, known or {})
        self._key: str | None = None
        self._left = 0
        self._running = hasher()

    @staticmethod
    def _planned(
        header_bytes: int, specs: Mapping[str, TensorSpec], known: Digests
    ) -> Iterator[tuple[str | None, int]]:
        """Each block's tensor and length; without a tensor, bytes that need no digest."""
        yield None, header_bytes
        for key, spec in specs.items():
            step = block_bytes(spec)
            if key in known:
                yield None, spec.size_bytes
                continue
            for begin in range(0, spec.size_bytes, step):
                yield key, min(step, spec.size_bytes - begin)

    def of_filled(self, fill: Fill) -> Fill:
        """A `fill` whose bytes this takes."""

        def filling(memory: memoryview) -> None:
            fill(memory)
            self.update(memory)

        return filling

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the file."""
        while data:
            while not self._left:
                self._key, self._left = next(self._blocks)
            part = data[: self._left]
            data, self._left = data[len(part) :], self._left - len(part)
            if self._key is not None:
                self._running.update(part)
                if not self._left:
                    self.by_key[self._key] += self._running.hexdigest()[:DIGITS]
                    self._running.reset()


@dataclass(frozen=True, slots=True)
class DigestBlock:
    """Bytes of a file that have a digest; or that have none, and may be read in part."""

    begin: int
    end: int
    key: str = ""
    digest: str = ""

    def holds(self, data: memoryview | bytearray) -> bool:
        """Whether these are the bytes that were written."""
        return not self.digest or digest_bytes(memoryview(data))[:DIGITS] == self.digest


class FileBlocks:
    """The blocks of a file."""

    def __init__(self, extents: Mapping[str, Extent], digests: Digests) -> None:
        """digests: of some or all tensors."""
        filled = (item for item in extents.items() if item[1].spec.size_bytes)
        self._tensors = sorted(filled, key=lambda item: item[1].begin)
        self._begins = [extent.begin for _, extent in self._tensors]
        self._digests = digests

    def within(self, begin: int, end: int) -> Iterator[DigestBlock]:
        """The blocks of a range, in order; the first and the last may reach beyond it."""
        first = bisect_right(self._begins, begin) - 1
        if first < 0:
            yield DigestBlock(begin, min([end, *self._begins[:1]]))
        for key, extent in self._tensors[max(0, first) :]:
            if extent.begin >= end:
                return
            yield from self._of_tensor(key, extent, begin, end)

    def _of_tensor(self, key: str, extent: Extent, begin: int, end: int) -> Iterator[DigestBlock]:
        start, stop = extent.begin, extent.begin + extent.spec.size_bytes
        begin, end = max(begin, start), min(end, stop)
        digests = self._digests.get(key)
        if not digests:
            yield DigestBlock(begin, end, key)
            return
        step = block_bytes(extent.spec)
        for number in range((begin - start) // step, -(-(end - start) // step)):
            at = start + number * step
            digest = digests[number * DIGITS : (number + 1) * DIGITS]
            yield DigestBlock(at, min(at + step, stop), key, digest)


class BlockCache:
    """The last few blocks that were read for a part of them. For any number of threads: one reads a
    block, and the others wait for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: OrderedDict[tuple[str, int], Future[bytearray]] = OrderedDict()

    def get(
        self, url: str, block: DigestBlock, read: Callable[[DigestBlock], bytearray]
    ) -> bytearray:
        """A block of a file; `read` raises an error for one that cannot be had."""
        with self._lock:
            found = self._held.get((url, block.begin))
            future: Future[bytearray] = Future() if found is None else found
            self._held[url, block.begin] = future
            self._held.move_to_end((url, block.begin))
            if len(self._held) > CACHED_BLOCKS:
                self._held.popitem(last=False)
        if found is None:
            try:
                future.set_result(read(block))
            except BaseException as error:
                future.set_exception(error)
        return future.result()
