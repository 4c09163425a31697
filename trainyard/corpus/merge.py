"""Merges pairs of token files into one, as streams: memory does not grow with the data.

The .bin files are concatenated in the given order; offsets and document bounds of the indices are
shifted. Merging the parts of a corpus gives the same bytes as tokenizing the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.artifacts import inputs, store
from trainyard.artifacts.digest import hasher
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.store import FileRecord, OutputFile, SourceFile
from trainyard.artifacts.urls import is_local
from trainyard.corpus.layout import (
    HEADER,
    ByteSink,
    Index,
    check_bin_size,
    index_of,
    verify_index,
    write_array,
    write_header,
    write_offsets,
)
from trainyard.corpus.pairs import DOCS, find_pairs
from trainyard.corpus.provenance.origins import SidecarPart as Origins
from trainyard.corpus.provenance.origins import join_provenance
from trainyard.corpus.provenance.sidecar import HEADER as DOCS_HEADER
from trainyard.corpus.provenance.sidecar import parse_header
from trainyard.corpus.readers import FileReader
from trainyard.corpus.remote import CacheOptions, LazyArray, RangedFile
from trainyard.errors import ArtifactError, ConfigError

__all__ = [
    "TokenPart",
    "find_pairs",
    "have_provenance",
    "merge_index",
    "merge_provenance",
    "merge_tokens",
    "survey",
    "survey_outlines",
]

INDEX_BYTES = 256 << 20
"""Bytes of remote indices that are cached on local disk; the rest is read again."""

NUM_THREADS = 4
NUM_REMOTE_THREADS = 16


@dataclass(frozen=True, slots=True)
class TokenPart:
    """One pair to merge, as it was found. Its index is opened again when it is needed, since a
    process may have only a few hundred open files."""

    prefix: str
    bin: SourceFile
    listed: FileRecord | None
    """The .bin in the manifest that lists it."""
    idx: SourceFile
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    is_multimodal: bool

    @property
    def bin_bytes(self) -> int:
        """Size of the .bin."""
        return self.bin.size_bytes


def survey(
    prefixes: Sequence[str],
    cache: Path,
    multimodal: bool | None = None,
    manifests: inputs.Manifests | None = None,
) -> list[TokenPart]:
    """Check every pair completely, and that all fit together, before anything is written.

    multimodal: whether the pairs must be multimodal; None allows either, but not both. A file
    without a sequence fits either. cache: folder for blocks of remote .idx files. manifests: those
    that were read before."""
    survey_one = partial(_survey_one, cache=cache)
    return _survey_each(prefixes, survey_one, multimodal, manifests)


def survey_outlines(
    prefixes: Sequence[str],
    multimodal: bool | None = None,
    manifests: inputs.Manifests | None = None,
) -> list[TokenPart]:
    """As `survey`, from the header and the sizes of each pair: a few requests, whatever its
    size."""
    return _survey_each(prefixes, _survey_outline, multimodal, manifests)


def _survey_each(
    prefixes: Sequence[str],
    survey_one: Callable[[str, inputs.Manifests], TokenPart],
    multimodal: bool | None,
    manifests: inputs.Manifests | None,
) -> list[TokenPart]:
    threads = NUM_THREADS if all(map(is_local, prefixes)) else NUM_REMOTE_THREADS
    with ThreadPoolExecutor(threads, thread_name_prefix="survey") as executor:
        known = inputs.Manifests() if manifests is None else manifests
        parts = list(executor.map(lambda prefix: survey_one(prefix, known), prefixes))
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise ArtifactError(
                f"{part.prefix} stores {part.dtype}, but {parts[0].prefix} stores "
                f"{parts[0].dtype}; all must have one type, so tokenize them with the same "
                "tokenizer"
            )
    _check_kind([part for part in parts if part.num_sequences], multimodal)
    return parts


def _check_kind(parts: Sequence[TokenPart], multimodal: bool | None) -> None:
    for part in parts:
        if part.is_multimodal != parts[0].is_multimodal:
            one, other = (p.prefix for p in sorted((part, parts[0]), key=lambda p: p.is_multimodal))
            raise ArtifactError(
                f"{one} has only text, but {other} is multimodal; they cannot be merged"
            )
    for part in parts[:1]:
        if multimodal is True and not part.is_multimodal:
            raise ArtifactError(
                f"{part.prefix}.idx has only text, without modes; leave out --multimodal"
            )
        if multimodal is False and part.is_multimodal:
            raise ArtifactError(f"{part.prefix}.idx is multimodal; merge it with --multimodal")


def _survey_one(prefix: str, manifests: inputs.Manifests, cache: Path) -> TokenPart:
    idx, tokens = (_look_at(prefix + ending, manifests) for ending in (".idx", ".bin"))
    record, read = manifests.record(idx.url), _reader(idx, cache)
    if record is not None:  # by the reader that keeps what is remote, since it is read again
        running = hasher()
        for start in range(0, idx.size_bytes, store.CHUNK):
            running.update(read(start, min(start + store.CHUNK, idx.size_bytes)))
        check_digest(idx.url, record, running.hexdigest())
    index = _index(idx, read)
    verify_index(index, idx.url)
    return _part(index, idx, tokens, prefix, manifests)


def _survey_outline(prefix: str, manifests: inputs.Manifests) -> TokenPart:
    idx, tokens = (_look_at(prefix + ending, manifests) for ending in (".idx", ".bin"))

    def read(begin: int, end: int) -> bytes:
        return store.read_range(idx.url, begin, end, idx.version)

    header = read(0, min(HEADER.size, idx.size_bytes))
    index = index_of(header, idx.size_bytes, partial(LazyArray, read), idx.url)
    return _part(index, idx, tokens, prefix, manifests)


def _part(
    index: Index, idx: SourceFile, tokens: SourceFile, prefix: str, manifests: inputs.Manifests
) -> TokenPart:
    check_bin_size(index, tokens.size_bytes, prefix)
    return TokenPart(
        prefix,
        tokens,
        manifests.record(tokens.url),
        idx,
        index.dtype,
        len(index.sequence_lengths),
        len(index.document_indices) - 1,
        index.modes is not None,
    )


def _look_at(url: str, manifests: inputs.Manifests) -> SourceFile:
    found = manifests.info(url)
    return SourceFile(url, found.size_bytes, found.version)


def merge_tokens(
    parts: Sequence[TokenPart], out: ByteSink, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Concatenate the .bin files; `on_bytes` gets the size of each piece written.

    Raises ArtifactError at the end for one that is not the file in its manifest."""
    parts = [part for part in parts if part.bin_bytes]
    sources = [part.bin for part in parts]
    if not isinstance(out, OutputFile):
        for piece in store.read_files(sources):
            out.write(piece)
            on_bytes(len(piece))
        return
    digests = out.append_files(sources, on_bytes)
    for part, digest in zip(parts, digests, strict=True):
        if part.listed is not None:
            check_digest(part.bin.url, part.listed, digest)


def merge_index(parts: Sequence[TokenPart], cache: Path, out: ByteSink) -> None:
    """Write the .idx of the merged tokens."""
    num_bounds = 1 + sum(part.num_documents for part in parts)
    write_header(out, parts[0].dtype, sum(part.num_sequences for part in parts), num_bounds)
    for part in parts:
        write_array(out, _open(part.idx, cache).sequence_lengths, "<i4")
    end = 0
    for part in parts:
        lengths = _open(part.idx, cache).sequence_lengths
        end = write_offsets(out, lengths, part.dtype.itemsize, end)
    write_array(out, np.zeros(1), "<i8")
    shift = 0
    for part in parts:
        bounds = _open(part.idx, cache).document_indices
        write_array(out, bounds, "<i8", shift, first=1)
        shift += part.num_sequences
    for part in parts:
        modes = _open(part.idx, cache).modes
        if modes is not None:
            write_array(out, modes, "i1")


def _open(idx: SourceFile, cache: Path) -> Index:
    """An index in the version that was found, as arrays to read in order. It is not mapped, as a
    large map would count as memory of this process."""
    return _index(idx, _reader(idx, cache))


def _reader(idx: SourceFile, cache: Path) -> Callable[[int, int], Any]:
    path = store.local_path(idx.url)
    if path is None:
        options = CacheOptions(cache, max_bytes=INDEX_BYTES)
        return RangedFile(idx.url, options, store.FileInfo(idx.size_bytes, idx.version)).read
    if store.info(idx.url) == store.FileInfo(idx.size_bytes, idx.version):
        return FileReader(path, np.dtype(np.uint8)).read
    raise ArtifactError(f"{idx.url}: changed while it was being merged; run again")


def _index(idx: SourceFile, read: Callable[[int, int], Any]) -> Index:
    header = bytes(read(0, min(HEADER.size, idx.size_bytes)))
    return index_of(header, idx.size_bytes, partial(LazyArray, read), idx.url)


# --- provenance -------------------------------------------------------------------------------


def have_provenance(parts: Sequence[TokenPart], files: Sequence[str]) -> bool:
    """Whether every pair has a sidecar; False if none has one.

    Raises ConfigError if only some have one, and ArtifactError if a sidecar has another number of
    documents than its pair."""
    known = set(files)
    have = [part.prefix + DOCS in known for part in parts]
    if any(have) and not all(have):
        one, other = parts[have.index(True)].prefix, parts[have.index(False)].prefix
        raise ConfigError(
            f"{one} has a {DOCS} sidecar but {other} has none, so the origin of some documents "
            "would be unknown; make the missing sidecars, or give --drop-provenance"
        )
    for part in parts if all(have) else ():
        url = part.prefix + DOCS
        size = store.info(url).size_bytes
        head = store.read_range(url, 0, min(DOCS_HEADER.size, size))
        header = parse_header(head, size, url)
        if header.num_documents != part.num_documents:
            raise ArtifactError(
                f"{url} has {header.num_documents} documents, but {part.prefix}.idx has "
                f"{part.num_documents}; they are from different runs"
            )
    return all(have)


def merge_provenance(parts: Sequence[TokenPart], out: ByteSink, scratch: Path) -> None:
    """Write the sidecar of the merged tokens."""
    join_provenance([Origins(part.prefix + DOCS) for part in parts], out, scratch)
