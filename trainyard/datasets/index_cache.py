"""Caches indices between runs, at a path or URL: a memo of the pure functions that make them.

The key of an entry is the contents of its function's arguments, never a path: the digest of the
sequence lengths and of the documents, the sequence length, the seed, the number of samples. Moving
token files changes nothing; files with other contents have other entries.

    CACHE/KEY.NAME.npy  the arrays of the entry
    CACHE/KEY.json      {"format_version", "facts", "arrays": {NAME: {"size_bytes", "digest"}}},
                        written last; without it the entry does not exist

A file is valid if its digest is the one listed. Each machine computes a digest once and caches it,
as for a raw input. Damaged entries are built again. Local entries are mapped; entries of an object
store are first copied to the cache folder of the machine, whose size `Copies` limits.

On one machine, one process builds an entry and the others wait for it. Machines do not wait for
each other, because all of them write the same bytes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.artifacts import store
from trainyard.artifacts.by_version import cache_folder, one_at_a_time
from trainyard.artifacts.digest import digest_document, hasher
from trainyard.artifacts.inputs import raw_digest
from trainyard.artifacts.store import OutputFile
from trainyard.artifacts.urls import check_relative, join, local_path
from trainyard.corpus.blocks import TOUCH_SECONDS, BlockFolder
from trainyard.datasets import blend as blends
from trainyard.datasets.arrays import (
    CHUNK,
    Arrays,
    Pieces,
    digest_array,
    map_array,
    write_header,
    write_rows,
)
from trainyard.datasets.samples import Documents, SampleIndices, build_sample_indices
from trainyard.errors import ArtifactError, ConfigError, TrainyardError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
KEY_DIGITS = 32

COPY = "whole.npy"
"""Name of the one file of each digest."""

MAX_BYTES = 16 << 30
VARIABLE = "TRAINYARD_INDEX_CACHE_BYTES"

Blend = tuple[NDArray[np.int16], NDArray[np.int64]]


Remember = Callable[[str, Callable[[], object]], object]
"""(what, compute) -> the result of `compute`, from memory if what it depends on is the same."""


def compute_again(what: str, compute: Callable[[], object]) -> object:
    """Remembers nothing."""
    return compute()


class Indexer(Protocol):
    """Where datasets get their indices from."""

    def samples(
        self,
        sequence_lengths: NDArray[np.int32],
        documents: Documents,
        seq_length: int,
        seed: int,
        num_samples: int | None = None,
        extra_token: bool = True,
        drop_last_partial: bool = True,
        remember: Remember = compute_again,
    ) -> SampleIndices:
        """As `samples.build_sample_indices`. remember: for what depends on the token file alone."""

    def blend(self, weights: list[float], num_samples: int) -> Blend:
        """As `blend.blend`."""

    def blend_exhaustive(self, sizes: list[int]) -> Blend:
        """As `blend.blend_exhaustive`."""

    def arrays(self, facts: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The result of `build`, which must be a pure function of `facts`, a JSON document."""

    def largest_token(self, facts: Mapping[str, Any], scan: Callable[[], Arrays]) -> Arrays | None:
        """The result of `scan`, which reads a whole token file, if it is cached; else None, so that
        no run waits for it."""


class InMemory:
    """Builds every index in memory."""

    def samples(self, *arguments: Any, remember: object = None, **more: Any) -> SampleIndices:
        """As `samples.build_sample_indices`."""
        return build_sample_indices(*arguments, **more)

    blend = staticmethod(blends.blend)
    blend_exhaustive = staticmethod(blends.blend_exhaustive)

    def arrays(self, facts: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """What `build` returns."""
        return build()

    def largest_token(self, facts: Mapping[str, Any], scan: Callable[[], Arrays]) -> Arrays | None:
        """None: it is not known."""
        return None


IN_MEMORY = InMemory()


class IndexCache:
    """Finds indices at `url`, and builds and saves missing ones.

    A read-only place still serves its entries; the rest is built in memory, with a warning."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.url = url
        self.read_only = read_only
        self._warned = ""
        """The entry for which the last warning was logged."""

    def samples(
        self,
        sequence_lengths: NDArray[np.int32],
        documents: Documents,
        seq_length: int,
        seed: int,
        num_samples: int | None = None,
        extra_token: bool = True,
        drop_last_partial: bool = True,
        remember: Remember = compute_again,
    ) -> SampleIndices:
        """As `samples.build_sample_indices`."""
        numbers: dict[str, Any] = {
            "seq_length": seq_length,
            "seed": seed,
            "num_samples": num_samples,
            "extra_token": extra_token,
            "drop_last_partial": drop_last_partial,
        }
        facts = {
            "function": "sample_indices",
            "sequence_lengths": remember(
                "sequence lengths", lambda: digest_array(sequence_lengths, "<i4")
            ),
            "documents": digest_array(documents, "<i4")
            if not isinstance(documents, range)
            else remember(str(documents), lambda: digest_range(documents)),
            **numbers,
        }

        def build() -> Arrays:
            made = build_sample_indices(sequence_lengths, documents, **numbers)
            return {name: getattr(made, name) for name in SampleIndices.__slots__}

        return SampleIndices(**self.arrays(facts, build))

    def blend(self, weights: list[float], num_samples: int) -> Blend:
        """As `blend.blend`."""
        blends.normalise(weights)  # refuses some
        facts = {"function": "blend", "weights": weights, "num_samples": num_samples}
        return self._blend(facts, num_samples, lambda: blends.blend_pieces(weights, num_samples))

    def blend_exhaustive(self, sizes: list[int]) -> Blend:
        """As `blend.blend_exhaustive`."""
        facts = {"function": "blend_exhaustive", "sizes": sizes}
        return self._blend(facts, sum(sizes), lambda: blends.exhaustive_pieces(sizes))

    def _blend(
        self, facts: Mapping[str, Any], num_samples: int, make: Callable[[], Iterator[Blend]]
    ) -> Blend:
        names = ("dataset_index", "dataset_sample_index")
        types = map(np.dtype, (np.int16, np.int64))
        shapes = {name: (dtype, (num_samples,)) for name, dtype in zip(names, types, strict=True)}

        def pieces() -> Iterator[Arrays]:
            return (dict(zip(names, piece, strict=True)) for piece in make())

        found = self._entry(facts, lambda: Pieces(shapes, pieces))
        return found[names[0]], found[names[1]]

    # --- entries ----------------------------------------------------------------------------

    def arrays(self, facts: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The arrays for `facts`: found, or built by `build` and saved."""
        return self._entry(facts, lambda: Pieces.of(build()))

    def _entry(self, facts: Mapping[str, Any], build: Callable[[], Pieces]) -> Arrays:
        facts = {"format_version": FORMAT_VERSION, **facts}
        key = key_of(facts)
        found = self.find(key)
        if found is not None:
            return found
        with one_at_a_time(key):
            found = self.find(key)  # another process may have built it since
            if found is not None:
                return found
            made = build()
            self._warned = ""
            return self.keep(key, facts, made)

    def largest_token(self, facts: Mapping[str, Any], scan: Callable[[], Arrays]) -> Arrays | None:
        """The place that `stages.index` found and saved, or None."""
        return self.find(key_of({"format_version": FORMAT_VERSION, **facts}))

    def find(self, key: str) -> Arrays | None:
        """The entry, if it exists and is complete."""
        url = join(self.url, document_name(key))
        try:
            if not store.exists(url):
                return None
            return {
                name: _load(join(self.url, array_name(key, name)), size_bytes, digest)
                for name, size_bytes, digest in _listed(url, key)
            }
        except (ArtifactError, OSError) as error:
            # OSError: only of the machine's own folder; stores raise ArtifactError.
            if key != self._warned:  # it is searched twice before it is built
                log.warning("%s; this index is built again", error)
            self._warned = key
            return None

    def keep(self, key: str, facts: Mapping[str, Any], made: Pieces) -> Arrays:
        """Write an entry, its document last; returns its arrays."""
        if self.read_only:
            return made.whole()
        try:
            write_entry(lambda name: store.open_output(join(self.url, name)), key, facts, made)
        except TrainyardError as error:
            log.warning("--data-cache-path: index %s is not saved: %s", key[:8], error)
            return made.whole()
        log.info("saved index %s (%s) in %s", key[:8], facts["function"], self.url)
        return self.kept(key, made)

    def kept(self, key: str, made: Pieces) -> Arrays:
        """The arrays of an entry that was just written."""
        folder = local_path(self.url)
        if folder is None:
            return made.whole()
        # Mapped, the ranks of a machine share one copy.
        return {name: map_array(folder / array_name(key, name)) for name in made.shapes}


def digest_range(numbers: range) -> str:
    """`digest_array` of the array of these numbers."""
    running = hasher()
    for start in range(numbers.start, numbers.stop, CHUNK):
        piece = np.arange(start, min(start + CHUNK, numbers.stop), dtype="<i4")
        running.update(piece.view(np.uint8))
    return f"{len(numbers)}:{running.hexdigest()}"


def key_of(facts: Mapping[str, Any]) -> str:
    """The key of the entry of these facts."""
    return digest_document(facts)[:KEY_DIGITS]


def document_name(key: str) -> str:
    """Name of the document of an entry; without it the entry does not exist."""
    return f"{key}.json"


def array_name(key: str, name: str) -> str:
    """Name of the file of one array."""
    return f"{key}.{name}.npy"


def write_entry(
    open_output: Callable[[str], OutputFile], key: str, facts: Mapping[str, Any], made: Pieces
) -> None:
    """Write the files of an entry, its document last."""
    listed = {}
    with ExitStack() as opened:
        files = {
            name: opened.enter_context(open_output(array_name(key, name))) for name in made.shapes
        }
        for name, (dtype, shape) in made.shapes.items():
            write_header(files[name], dtype, shape)
        for piece in made.make():
            for name, rows in piece.items():
                write_rows(files[name], rows)
    for name, file in files.items():
        listed[name] = {"size_bytes": file.record.size_bytes, "digest": file.record.digest}
    document = {"format_version": FORMAT_VERSION, "facts": dict(facts), "arrays": listed}
    with open_output(document_name(key)) as file:
        file.write(_encode(document))


def _encode(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _listed(url: str, key: str) -> Iterator[tuple[str, int, str]]:
    """Name, size and digest of the files that the document of an entry lists."""
    document = store.read_json(url)
    try:
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {document['format_version']}")
        if key_of(document["facts"]) != key:
            raise ValueError("it belongs to another index")
        for name, record in document["arrays"].items():
            yield check_relative(name), int(record["size_bytes"]), str(record["digest"])
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{url}: not the document of an index ({error!r})") from error


def _load(url: str, size_bytes: int, digest: str) -> NDArray[Any]:
    """The array in a file. Raises ArtifactError if it is not as listed."""
    if (found := store.info(url).size_bytes) != size_bytes:
        raise ArtifactError(f"{url} is {found} bytes, not {size_bytes}: truncated or replaced")
    path = local_path(url) or _copy(url, size_bytes, digest)
    if raw_digest(str(path)) != digest:
        raise ArtifactError(f"{url}: its contents are not those that its document lists")
    return map_array(path)


def _copy(url: str, size_bytes: int, digest: str) -> Path:
    """A remote file in the cache folder of this machine, by the digest of its contents."""
    copies = Copies(cache_folder() / "indices", max_copied_bytes())
    path = copies.path(digest, COPY)
    if path.exists() and raw_digest(str(path)) == digest:
        copies.use(digest)
        return path
    log.debug("copying %s to %s", url, path)
    with store.open_input(url) as source:
        return copies.put(
            digest, COPY, size_bytes, lambda file: shutil.copyfileobj(source, file, store.CHUNK)
        )


# --- copies of remote files -------------------------------------------------------------------
# FOLDER/blocks/DIGEST/whole.npy is a file by the digest of its contents. The folder is bounded: the
# copy used longest ago goes first. A copy removed while a process maps it stays whole there.


def max_copied_bytes() -> int:
    """Bytes of all copies together: TRAINYARD_INDEX_CACHE_BYTES, else 16 GiB."""
    given = os.environ.get(VARIABLE, "")
    if given and not given.isdecimal():
        raise ConfigError(f"{VARIABLE}={given!r}: give a number of bytes")
    return int(given) if given else MAX_BYTES


class Copies(BlockFolder):
    """A folder of blocks in which the folder of a file says when it was used: the file's own time
    is part of what its digest is remembered by."""

    def use(self, digest: str) -> None:
        """Note that a copy is used."""
        folder = self.root / digest
        with suppress(OSError):  # of another user, or gone: it keeps its place in the queue
            if time.time() - folder.stat().st_mtime > TOUCH_SECONDS:
                os.utime(folder)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        for _, size, path in super()._files():
            with suppress(FileNotFoundError):
                yield Path(path).parent.stat().st_mtime, size, path
