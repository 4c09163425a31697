"""The blocks of a paged cache: who holds which, and which of the free ones still hold a known text.

A block has room for the keys and values of a fixed number of consecutive tokens. A full block may
be published under the digest of its tokens and of all tokens before them, and then serves every
text that begins with these. Free blocks keep what they hold until they are taken, the least
recently used first. No torch."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Digest = bytes

NO_TEXT: Digest = b""
"""Of the beginning of a text."""


def digest_of(before: Digest, tokens: Sequence[int]) -> Digest:
    """Names the text that ends with a block of these tokens. before: of the blocks before it.

    128 bits of BLAKE2, so that nobody finds two texts with one name."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each free or allocated to one or more texts."""

    def __init__(self, num_blocks: int, *, keeps_texts: bool = True) -> None:
        """keeps_texts: whether published blocks are found again (prefix caching)."""
        self.num_blocks, self._keeps_texts = num_blocks, keeps_texts
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """Least recently used first; those that hold no known text before all others."""
        self._digest: dict[int, Digest] = {}
        self._block: dict[Digest, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that a text holds."""
        return self.num_blocks - len(self._free)

    def holders(self, block: int) -> int:
        """Number of texts to which a block is allocated."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """Allocate free blocks to one text; their earlier contents are forgotten."""
        assert count <= self.num_free, f"{count} blocks of {self.num_free} free ones"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            if (digest := self._digest.pop(block, None)) is not None:
                del self._block[digest]
        return blocks

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """The published blocks of the longest prefix of a text, not yet allocated to it."""
        found = []
        for digest in digests:
            if (block := self._block.get(digest)) is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Allocate published blocks to one more text."""
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks of one text, in its order. Blocks of its end are reused first, because its
        beginning is more likely to be a prefix of another text."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is not allocated"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if block not in self._digest:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: Digest) -> None:
        """Publish the contents of a full block. Of equal contents, only the first block."""
        assert self._holders[block] > 0, f"block {block} is not allocated"
        if self._keeps_texts and digest not in self._block and block not in self._digest:
            self._digest[block] = digest
            self._block[digest] = block

    def check(self) -> None:
        """Assert that every block is either allocated or free, and that digests are unique."""
        for block, count in enumerate(self._holders):
            assert count >= 0, f"block {block} is allocated {count} times"
            assert (count == 0) == (block in self._free), (
                f"block {block} is allocated {count} times"
            )
        assert {digest: block for block, digest in self._digest.items()} == self._block
