"""Nodes of blocks give the digest that the library gives of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.subtree_digest import CHUNK_BYTES, digest_of_nodes, node_of


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [CHUNK_BYTES, 4 * CHUNK_BYTES])
@pytest.mark.parametrize("size", [1, 64, 65, 1024, 1025, 3073, 4096, 4097, 8192, 13 * 1024 + 64])
def test_nodes_of_blocks_give_the_digest_of_the_whole(block_bytes: int, size: int) -> None:
    check_nodes(block_bytes, size)


def test_two_blocks_give_the_digest_of_the_whole() -> None:
    check_nodes(4 * CHUNK_BYTES, 4 * CHUNK_BYTES + 77)


def check_nodes(block_bytes: int, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    nodes = [
        node_of(data[start : start + block_bytes], start, size)
        for start in range(0, size, block_bytes)
    ]
    assert digest_of_nodes(b"".join(nodes)) == digest_bytes(data)


def test_a_node_depends_on_its_place() -> None:
    data = bytes(CHUNK_BYTES)
    far = 2**32 * CHUNK_BYTES  # the number of the chunk needs its second word
    nodes = {node_of(data, start, far + CHUNK_BYTES) for start in (0, CHUNK_BYTES, far)}
    assert len(nodes) == 3
