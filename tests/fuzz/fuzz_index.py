"""Any .idx and .bin give sequences, the same from every reader, or an ArtifactError."""

from __future__ import annotations

import io

import atheris
from common import fuzz, only, scratch

with atheris.instrument_imports(include=["trainyard.corpus"]):
    from trainyard.corpus import indexed, layout, merge, readers, remote  # noqa: F401

import numpy as np

from trainyard.artifacts import store
from trainyard.corpus.indexed import CacheOptions, IndexedDataset, IndexedWriter, Reader
from trainyard.corpus.merge import merge_index, merge_tokens, survey
from trainyard.errors import ArtifactError

FOLDER = scratch()
PREFIX = str(FOLDER / "a")
READERS: tuple[Reader, ...] = ("mmap", "file", "ranged")
MAX_SEQUENCES = 200


def small(dtype: str, multimodal: bool) -> bytes:
    """What the target takes: u16 bytes of the .bin, the .idx, then so many bytes of .bin."""
    bin_file, idx_file = io.BytesIO(), io.BytesIO()
    writer = IndexedWriter(bin_file, dtype, multimodal)
    for document in ([[1, 2, 3], [4]], [], [[5]]):
        writer.add_document(document)
    writer.write_index(idx_file)
    tokens = bin_file.getvalue()
    return len(tokens).to_bytes(2, "little") + idx_file.getvalue() + tokens


SEEDS = (small("uint16", False), small("int32", True), small("float64", False))


def target(data: bytes) -> None:
    size = min(int.from_bytes(data[:2], "little"), len(data) - 2)
    if size < 0:
        return
    idx, tokens = data[2 : len(data) - size], data[len(data) - size :]
    (FOLDER / "a.idx").write_bytes(idx)
    (FOLDER / "a.bin").write_bytes(tokens)
    with only(ArtifactError):
        layout.verify_index(layout.parse_index(np.frombuffer(idx, np.uint8), "a.idx"), "a.idx")
    with only(ArtifactError):
        cache = CacheOptions(FOLDER / "cache", max_bytes=1 << 16, block_bytes=64)
        found = [IndexedDataset(PREFIX, reader, cache) for reader in READERS]
        for i in range(min(len(found[0]), MAX_SEQUENCES)):
            pieces = [dataset.get(i).tobytes() for dataset in found]
            start = int(found[0].sequence_offsets[i])
            assert pieces == [tokens[start : start + len(pieces[0])]] * len(READERS)
            assert len(pieces[0]) == found[0].sequence_lengths[i] * found[0].dtype.itemsize
        assert found[0].index.bin_bytes == len(tokens)
        twice()


def twice() -> None:
    """What can be opened can be merged, and what comes of it can be opened."""
    parts = survey([PREFIX, PREFIX], FOLDER)
    prefix = str(FOLDER / "merged")
    with store.open_output(prefix + ".bin") as out:
        merge_tokens(parts, out)
    with store.open_output(prefix + ".idx") as out:
        merge_index(parts, FOLDER, out)
    one, whole = IndexedDataset(PREFIX), IndexedDataset(prefix)
    assert len(whole) == 2 * len(one)
    assert whole.num_documents == 2 * one.num_documents
    for i in range(min(len(one), MAX_SEQUENCES)):
        assert whole.get(i + len(one)).tobytes() == one.get(i).tobytes()


if __name__ == "__main__":
    fuzz(target, SEEDS)
