"""Digests of files in blocks, which several machines can take together, each of its own ranges.

The digest of a file of more than one block is that of the digests of its blocks; a file of one
block has the same as by `inputs.raw_digest`. Such a digest is marked (`MARK`) wherever it is
recorded, since it differs from that of the whole file. Here too: the mark of a version of a file,
which stands for its contents until they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainyard.artifacts import store
from trainyard.artifacts.by_version import DIGEST, remember, remembered
from trainyard.artifacts.digest import digest_document, hasher
from trainyard.artifacts.inputs import raw_digest
from trainyard.artifacts.store import FileInfo

BLOCK_BYTES = 8 << 20

MARK = "blocks:"
"""Begins the digest of an input of which a file was digested in blocks."""

BLOCKS = "blocks"
"""The name under which such digests are remembered."""


def combined(size_bytes: int, digests: Sequence[str]) -> str:
    """The digest of a file of which these are the digests of all blocks, in order."""
    assert len(digests) == num_blocks(size_bytes), "blocks are missing"
    return digests[0] if len(digests) == 1 else digest_document([BLOCK_BYTES, *digests])


def num_blocks(size_bytes: int, block_bytes: int | None = None) -> int:
    """Blocks of a file, of BLOCK_BYTES by default; an empty one has none."""
    return -(-size_bytes // (block_bytes or BLOCK_BYTES))


def block_digest(url: str) -> str:
    """The digest of a file in blocks: remembered, or from its contents."""
    if num_blocks(store.info(url).size_bytes) < 2:
        return raw_digest(url)
    return str(remembered(url, BLOCKS, lambda: _read(url)))


class BlockDigests:
    """Takes the digests of some files by `block_digest`, and says whether one was of blocks."""

    def __init__(self) -> None:
        self.in_blocks = False

    def __call__(self, url: str) -> str:
        """The digest of one."""
        if num_blocks(store.info(url).size_bytes) > 1:  # threads call this side by side
            self.in_blocks = True
        return block_digest(url)


def _read(url: str) -> str:
    size = store.info(url).size_bytes
    taken = RangeDigests(url, 0, size, size)
    return combined(size, taken.finish())


def version_mark(url: str) -> str:
    """What stands for the contents of a file without reading them: its size and version. Of a file
    without a version (some web servers have none), its digest."""
    found = store.info(url)
    return (
        digest_document([found.size_bytes, found.version]) if found.version else block_digest(url)
    )


def remember_digest(url: str, found: FileInfo, blocks: Mapping[int, str]) -> bool:
    """Remember the digest of the file that has these blocks, by their numbers; False if some are
    missing, or the file is no longer in that version."""
    numbers = range(len(blocks))
    if len(blocks) != num_blocks(found.size_bytes) or blocks.keys() != set(numbers):
        return False
    if store.info(url) != found:
        return False
    digest = combined(found.size_bytes, [blocks[number] for number in numbers])
    remember(url, BLOCKS if len(blocks) > 1 else DIGEST, digest)
    return True


class RangeDigests:
    """The digests of the blocks that begin in a range of a file, mostly of bytes that were read
    anyway: bytes that do not pass by are read at the end."""

    def __init__(
        self, url: str, start: int, end: int, file_bytes: int, block_bytes: int | None = None
    ) -> None:
        """block_bytes: of a block; BLOCK_BYTES by default."""
        block_bytes = block_bytes or BLOCK_BYTES
        self.first = num_blocks(start, block_bytes)
        """Number of the first block."""
        self._url, self._block_bytes = url, block_bytes
        self._at = self.first * block_bytes
        self._end = min(num_blocks(end, block_bytes) * block_bytes, file_bytes)
        self._found: list[str] = []
        self._running = hasher()

    def pass_by(self, offset: int, data: bytes) -> None:
        """Add bytes of the file that begin at `offset`; bytes added before are skipped."""
        if offset > self._at:
            return  # a gap, which `finish` reads with the rest
        view = memoryview(data)[self._at - offset : max(self._end - offset, 0)]
        while view:
            part = view[: self._block_bytes - self._at % self._block_bytes]
            self._running.update(part)
            self._at += len(part)
            view = view[len(part) :]
            if self._at % self._block_bytes == 0 or self._at == self._end:
                self._found.append(self._running.hexdigest())
                self._running = hasher()

    def finish(self) -> list[str]:
        """The digests, in order."""
        while self._at < self._end:
            until = min(self._at + store.CHUNK, self._end)
            self.pass_by(self._at, store.read_range(self._url, self._at, until))
        return self._found
