"""A block of a .bin that differs from its digest in the .sums is refused when it is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.artifacts.output import Output
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.corpus.readers import map_file
from trainyard.corpus.sums import BLOCK_BYTES, DIGEST_BYTES, HEADER, BlockDigests, Sums
from trainyard.datasets.vocabulary import largest
from trainyard.errors import ArtifactError

PER_BLOCK = BLOCK_BYTES // 2
NUM_TOKENS = 3 * PER_BLOCK + 100


def make(prefix: str) -> None:
    """A listed pair of three whole blocks and a short one, in documents of 1000 tokens."""
    with store.open_output(f"{prefix}.bin", ".bin") as out:
        sums, writer = BlockDigests(out), IndexedWriter(out, np.uint16)
        tokens = np.arange(NUM_TOKENS, dtype=np.uint16)
        for begin in range(0, NUM_TOKENS, 1000):
            writer.add_document([tokens[begin : begin + 1000]])
        with store.open_output(f"{prefix}.idx", ".idx") as idx:
            writer.write_index(idx)
    with store.open_output(f"{prefix}.sums", ".sums") as file:
        sums.write(file)
    records = (out.record, idx.record, file.record)
    publish(Output.prefix(prefix).manifest_url, Manifest(stage="tokenize", files=records), None)


def flip(url: str, place: int) -> None:
    data = bytearray(store.read_bytes(url))
    data[place] ^= 1
    store.write_bytes(url, bytes(data))


@pytest.mark.parametrize("way", ["mmap", "file", "ranged", "fetch"])
def test_only_a_damaged_block_is_refused(tmp_path: Path, way: str) -> None:
    prefix = str(tmp_path / "t")
    make(prefix)
    flip(f"{prefix}.bin", 2 * BLOCK_BYTES + 7)
    data = IndexedDataset(prefix, way)  # type: ignore[arg-type]
    for _ in range(2):
        assert data.get_flat(0, 2 * PER_BLOCK).tolist()[-1] == 2 * PER_BLOCK - 1
        assert data.get_flat(3 * PER_BLOCK, NUM_TOKENS).size == 100
        for begin, end in [(2 * PER_BLOCK - 1, 2 * PER_BLOCK + 1), (0, NUM_TOKENS)]:
            with pytest.raises(ArtifactError, match=r"t\.bin: bytes 131072 to 196608 are not"):
                data.get_flat(begin, end)
    with pytest.raises(ArtifactError, match=r"t\.bin: bytes 131072 to 196608 .* is damaged"):
        data.get(2 * PER_BLOCK // 1000)


def test_a_scan_for_the_largest_id_checks_what_it_reads(tmp_path: Path) -> None:
    prefix = str(tmp_path / "t")
    make(prefix)
    assert largest(IndexedDataset(prefix)) == [65535]
    flip(f"{prefix}.bin", BLOCK_BYTES)
    with pytest.raises(ArtifactError, match=r"t\.bin: bytes 65536 to 131072 are not"):
        largest(IndexedDataset(prefix))


def test_a_pair_in_a_store_is_checked_too(store_url: str) -> None:
    prefix = store.join(store_url, "t")
    make(prefix)
    assert IndexedDataset(prefix).get_flat(0, NUM_TOKENS).size == NUM_TOKENS
    flip(f"{prefix}.bin", 3 * BLOCK_BYTES + 199)
    with pytest.raises(ArtifactError, match=r"t\.bin: bytes 196608 to 196808 are not"):
        IndexedDataset(prefix).get_flat(NUM_TOKENS - 1, NUM_TOKENS)


@pytest.mark.parametrize("ending", [".idx", ".sums"])
def test_what_is_read_whole_is_compared_whole(tmp_path: Path, ending: str) -> None:
    prefix = str(tmp_path / "t")
    make(prefix)
    flip(prefix + ending, 40)
    with pytest.raises(ArtifactError, match=rf"t\{ending}: digest .* is damaged"):
        IndexedDataset(prefix)


def test_without_a_manifest_nothing_is_compared(tmp_path: Path) -> None:
    prefix = str(tmp_path / "t")
    make(prefix)
    Path(f"{prefix}.manifest.json").unlink()
    flip(f"{prefix}.bin", 0)
    assert IndexedDataset(prefix).get_flat(0, 1).tolist() == [1]


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=4))
def test_digests_do_not_depend_on_how_the_bytes_came(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    data = np.random.default_rng(1).bytes(3 * BLOCK_BYTES)
    data = data[: max(cuts, default=0)]
    url = str(tmp_path_factory.mktemp("sums") / "t")
    with store.open_output(f"{url}.bin") as out:
        sums = BlockDigests(out)
        for begin, end in zip([0, *sorted(cuts)], sorted(cuts), strict=False):
            out.write(data[begin:end])
    with store.open_output(f"{url}.sums") as file:
        sums.write(file)
    assert out.record.digest == blake3(data).hexdigest()
    blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
    digests = b"".join(blake3(block).digest()[:DIGEST_BYTES] for block in blocks)
    assert store.read_bytes(f"{url}.sums")[HEADER.size :] == digests


def test_a_file_of_another_pair_is_refused(tmp_path: Path) -> None:
    make(str(tmp_path / "t"))
    raw = map_file(tmp_path / "t.sums")
    with pytest.raises(ArtifactError, match=r"t\.sums is 80 bytes, which is not what a .bin of 5"):
        Sums(raw, "t.sums", 5)
    for broken in (raw[:9], np.zeros(80, np.uint8)):
        with pytest.raises(ArtifactError, match=r"t\.sums begins with"):
            Sums(broken, "t.sums", 2 * NUM_TOKENS)
