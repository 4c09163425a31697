"""Digests of the blocks of a .bin, so that whoever reads some of its tokens can check those.

PREFIX.sums, beside the pair, little endian:

    bytes   type    field
    8       bytes   magic "TYSUMS\\0\\0"
    8       u64     bytes of a block
    16 * n  bytes   of each block of the .bin the first 16 bytes of its blake3

The last block may be shorter. The manifest of the pair lists this file; without a manifest, nothing
is compared."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainyard.artifacts.digest import Both, hasher
from trainyard.artifacts.store import OutputFile
from trainyard.corpus.disk_array import Spill
from trainyard.corpus.layout import ByteSink, Tokens
from trainyard.errors import ArtifactError

MAGIC = b"TYSUMS\x00\x00"
HEADER = struct.Struct("<8sQ")

BLOCK_BYTES = 1 << 16
"""Of the blocks that are written: half of what Linux reads at a fault of mapped memory."""
DIGEST_BYTES = 16
"""Of the digest of a block."""
MAX_TOKEN_BYTES = 8
"""No token lies in two blocks."""


class BlockDigests:
    """The digests of blocks whose bytes pass by end to end, in memory that does not grow."""

    def __init__(self, out: OutputFile) -> None:
        """out: a .bin to which nothing was written yet; it digests its bytes anyway."""
        out.digest = Both(out.digest, self)
        self._found = Spill(np.uint8)
        self._running: Any = hasher()
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        view, found = memoryview(data).cast("B"), bytearray()
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._running.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                found += self._end_block()
        self._found.extend(np.frombuffer(found, np.uint8))

    def _end_block(self) -> bytes:
        digest: bytes = self._running.digest(length=DIGEST_BYTES)
        self._running, self._filled = hasher(), 0
        return digest

    def write(self, out: ByteSink) -> None:
        """Write the .sums of all bytes so far; take no more after that."""
        if self._filled:
            self._found.extend(np.frombuffer(self._end_block(), np.uint8))
        write_sums(out, (digests.tobytes() for digests in self._found.chunks()))


def digest_blocks(data: bytes | memoryview) -> bytes:
    """The digests, end to end, of the blocks in bytes that begin where a block does."""
    view, found = memoryview(data), bytearray()
    for start in range(0, len(view), BLOCK_BYTES):
        running = hasher()
        running.update(view[start : start + BLOCK_BYTES])
        found += running.digest(length=DIGEST_BYTES)
    return bytes(found)


def write_sums(out: ByteSink, digests: Iterable[bytes]) -> None:
    """Write a .sums of the digests of all blocks, given in pieces."""
    out.write(HEADER.pack(MAGIC, BLOCK_BYTES))
    for piece in digests:
        out.write(piece)


class Sums:
    """The contents of a .sums: the digest of every block of a .bin."""

    def __init__(self, raw: Tokens, url: str, bin_bytes: int) -> None:
        """raw: its bytes. Raises ArtifactError if they are not those of a .bin of that size."""
        magic, size = HEADER.unpack(raw[: HEADER.size].tobytes().ljust(HEADER.size, b"\0"))
        if magic != MAGIC or not size or size % MAX_TOKEN_BYTES:
            raise ArtifactError(f"{url} begins with {magic!r}, {size}: not the header of a .sums")
        self.block_bytes, self.bin_bytes = int(size), bin_bytes
        num_blocks = -(-bin_bytes // self.block_bytes)
        if len(raw) != HEADER.size + num_blocks * DIGEST_BYTES:
            raise ArtifactError(
                f"{url} is {len(raw)} bytes, which is not what a .bin of {bin_bytes} bytes has: "
                "they are from different runs; make the pair again"
            )
        self._digests = raw[HEADER.size :]

    def __len__(self) -> int:
        return len(self._digests) // DIGEST_BYTES

    def digest(self, block: int) -> bytes:
        """The digest of that block."""
        return self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES].tobytes()

    def matches(self, block: int, data: memoryview) -> bool:
        """Whether these are the bytes of that block."""
        running = hasher()
        running.update(data)
        return bool(running.digest(length=DIGEST_BYTES) == self.digest(block))
