"""The first two passes over a unit: its sizes, then its documents in the order of the mixture.

The second writes blocks, one for each shard that gets documents of the unit:

    u32 count n | u64[n] keys | u32[n] lengths of lines | the lines

A file holds the blocks of all shards in order; their ends are in its companion."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stages.mix.config import MixConfig
from stages.runtime.document_units import UnitDone, UnitFile, UnitJob
from trainyard.artifacts import store
from trainyard.collection import mixture
from trainyard.collection.counting import counter_of
from trainyard.collection.documents import Item, UnitReader, as_line
from trainyard.errors import ArtifactError, DataError

Array = npt.NDArray[Any]

PLAN = "plan.json"
MIXED = "mixed"
"""Key under which a document says which source it stands for, and in which of its epochs."""
PIECE_BYTES = 64 << 20
"""Lines of a unit that are ordered at once; a large compressed file makes several pieces."""

ADVICE = "--on-bad-line skip leaves such lines out"


@dataclass(frozen=True, slots=True)
class MixJob(UnitJob):
    """A unit of one source."""

    source: str = ""
    sizes: Sequence[UnitFile] = ()
    """For the second pass: what the first one wrote, of each piece."""


@dataclass(frozen=True, slots=True)
class MixPlan:
    """What the second pass has to know, for every worker."""

    num_shards: int
    epochs: dict[str, float]
    """By source."""
    limits: dict[str, int]
    """By source: the threshold of its last, partial epoch."""

    def write(self, folder: Path) -> None:
        """For workers."""
        document = [self.num_shards, self.epochs, self.limits]
        (folder / PLAN).write_text(json.dumps(document))

    @staticmethod
    def read(folder: Path) -> MixPlan:
        """What `write` wrote."""
        return MixPlan(*json.loads((folder / PLAN).read_text()))


def sizes_name(job: UnitJob) -> str:
    """The file of a unit's sizes."""
    return f"sizes-{job.label}.npz"


def reader_of(job: MixJob) -> UnitReader:
    """What reads a unit."""
    config: MixConfig = job.config
    return UnitReader(
        job.unit,
        job.names,
        config.json_key,
        config.on_bad_line,
        config.max_document_bytes,
        advice=ADVICE,
        digested=job.digested,
    )


def hash_of(text: bytes, source: str, seed: int) -> int:
    """Decides where a document stands and whether it is drawn; of the same text it is the same."""
    return xxhash.xxh3_64_intdigest(text, xxhash.xxh3_64_intdigest(source.encode(), seed))


def measure_unit(job: MixJob) -> UnitDone:
    """Write the size of each document, and how they spread over parts of an epoch."""
    config: MixConfig = job.config
    count = counter_of(config.count, config.tokenizer())
    reader = reader_of(job)
    sizes, hashes, text_bytes = [], [], 0
    for item in reader.items():
        text = str(item.fields[config.json_key])
        data = text.encode(errors="surrogatepass")
        sizes.append(count(text))
        hashes.append(hash_of(data, job.source, config.seed))
        text_bytes += len(data)
    found = np.array(sizes, np.int64)
    bins = np.zeros(mixture.BINS, np.int64)
    np.add.at(bins, mixture.bins_of(np.array(hashes, np.uint64)), found)
    out = io.BytesIO()
    np.savez(out, sizes=found, bins=bins, text_bytes=text_bytes, bad_lines=len(reader.bad))
    name = sizes_name(job)
    record = store.write_bytes(store.join(job.folder, name), out.getvalue(), name)
    return UnitDone((record,), {}, reader.digests)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What `measure_unit` wrote."""

    sizes: Array
    """(n,) i64 of each document."""
    bins: Array
    """(BINS,) i64."""
    text_bytes: int
    bad_lines: int

    @staticmethod
    def of_pieces(files: Sequence[UnitFile]) -> Sizes:
        """Those of a unit, from the files of its pieces; ArtifactError for a damaged one."""
        pieces = [Sizes._read(file) for file in files]
        return Sizes(
            np.concatenate([piece.sizes for piece in pieces]),
            np.sum([piece.bins for piece in pieces], axis=0),
            sum(piece.text_bytes for piece in pieces),
            sum(piece.bad_lines for piece in pieces),
        )

    @staticmethod
    def _read(file: UnitFile) -> Sizes:
        try:
            with np.load(io.BytesIO(file.read()), allow_pickle=False) as arrays:
                numbers = int(arrays["text_bytes"]), int(arrays["bad_lines"])
                return Sizes(arrays["sizes"], arrays["bins"], *numbers)
        except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
            raise ArtifactError(
                f"{file.url}: not the sizes of a unit ({error}); remove it and run again"
            ) from error


def scatter_unit(job: MixJob) -> UnitDone:
    """Write the blocks of a unit; facts: pieces, and documents and size in the mixture."""
    sizes = Sizes.of_pieces(job.sizes).sizes
    piece = _Piece(job, MixPlan.read(Path(job.scratch)))
    number = -1
    for number, item in enumerate(reader_of(job).items()):
        if number < len(sizes):
            piece.add(item, int(sizes[number]))
    if number + 1 != len(sizes):
        raise DataError(
            f"{job.unit.sources[0].url}: had {len(sizes)} documents when they were counted, and "
            f"{number + 1} now: a file was changed; run again"
        )
    piece.flush()
    facts = {"pieces": piece.ends, "documents": piece.documents, "size": piece.size}
    return UnitDone(tuple(piece.records), facts)


class _Piece:
    """Documents of a unit that are not written yet."""

    def __init__(self, job: MixJob, plan: MixPlan) -> None:
        self._job, self._plan = job, plan
        self._config: MixConfig = job.config
        self._waiting: list[tuple[dict[str, Any], int, int]] = []
        self._bytes = 0
        self.records: list[store.FileRecord] = []
        self.ends: list[list[int]] = []
        self.documents = self.size = 0

    def add(self, item: Item, size: int) -> None:
        """One document of the unit."""
        text = str(item.fields[self._config.json_key]).encode(errors="surrogatepass")
        hashed = hash_of(text, self._job.source, self._config.seed)
        self._waiting.append((item.fields, hashed, size))
        self._bytes += len(text)
        if self._bytes >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write a file with the documents that wait."""
        shards: list[list[tuple[int, bytes]]] = [[] for _ in range(self._plan.num_shards)]
        for shard, key, line in self._copies():
            shards[shard].append((key, line))
        self._waiting.clear()
        self._bytes = 0
        if not any(shards):
            return
        name = f"piece-{self._job.number:05d}-{len(self.ends):03d}"
        ends = [0]
        with store.open_output(store.join(self._job.folder, name), name) as out:
            for documents in shards:
                ends.append(ends[-1] + (out.write(as_block(documents)) if documents else 0))
        self.records.append(out.record)
        self.ends.append(ends)

    def _copies(self) -> Iterator[tuple[int, int, bytes]]:
        """(shard, key, line) of every copy."""
        source, plan = self._job.source, self._plan
        hashes = np.array([hashed for _, hashed, _ in self._waiting], np.uint64)
        copies = mixture.copies_of(hashes, plan.epochs[source], plan.limits[source])
        for copy in range(int(copies.max(initial=0))):
            chosen = np.flatnonzero(copies > copy)
            keys = mixture.order_keys(hashes[chosen], copy)
            shards = mixture.shards_of(keys, plan.num_shards)
            rows = zip(chosen.tolist(), keys.tolist(), shards.tolist(), strict=True)
            for i, key, shard in rows:
                fields, _, size = self._waiting[i]
                self.documents += 1
                self.size += size
                yield shard, key, as_line({**fields, MIXED: {"source": source, "epoch": copy + 1}})


def as_block(documents: list[tuple[int, bytes]]) -> bytes:
    """Keys and lines as a block."""
    keys = np.array([key for key, _ in documents], "<u8")
    lengths = np.array([len(line) for _, line in documents], "<u4")
    head = np.array([len(documents)], "<u4")
    lines = b"".join(line for _, line in documents)
    return b"".join([head.tobytes(), keys.tobytes(), lengths.tobytes(), lines])


def parse_block(block: bytes) -> list[tuple[int, bytes]]:
    """The inverse."""
    count = int(np.frombuffer(block, "<u4", 1)[0])
    keys = np.frombuffer(block, "<u8", count, 4).tolist()
    lengths = np.frombuffer(block, "<u4", count, 4 + 8 * count)
    ends = np.cumsum(lengths, dtype=np.int64) + 4 + 12 * count
    starts = (ends - lengths).tolist()
    lines = [block[a:b] for a, b in zip(starts, ends.tolist(), strict=True)]
    return list(zip(keys, lines, strict=True))
