"""One unit of work: the documents of some byte ranges to a pack for every JSON key.

A pure function of the ranges and the options, run in a thread of this process or of a worker."""

from __future__ import annotations

import fcntl
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from stages.tokenize.config import TokenizeConfig
from stages.tokenize.encode import Encoded, encode_block, find_difference, sampled
from stages.tokenize.pack import Summary
from trainyard.artifacts import store
from trainyard.artifacts.block_digest import RangeDigests
from trainyard.artifacts.store import OutputFile
from trainyard.artifacts.urls import canonical
from trainyard.corpus.documents import DocumentReader
from trainyard.corpus.formats.parse import excerpt
from trainyard.corpus.formats.records import BadLine, Document, DocumentColumns
from trainyard.corpus.indexed import IndexedWriter, optimal_dtype
from trainyard.corpus.provenance.origins import ProvenanceWriter
from trainyard.corpus.sentences import SentenceSplitter
from trainyard.corpus.units import Unit
from trainyard.corpus.workers import check_stop
from trainyard.errors import DataError, TrainyardError
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

LARGE_LETTERS = 32 << 20
"""Texts of this size take turns: the bound on memory is for one document, not for one a worker."""

UNIT = "unit-"
LARGE_TEXT_LOCK = "turn"
"""Names in the scratch folder: a folder for each unit, and a file that is locked while a large text
is encoded."""

ADVICE = "--on-bad-line skip leaves such lines out"

_building = threading.Lock()
_tools: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """The input of a worker."""

    unit: Unit
    config: TokenizeConfig
    work_url: str
    """Folder of the packs."""
    copies: str | None
    """Folder on this machine for a second copy of each, where `work_url` is a remote one."""
    scratch: str
    """Folder on this machine that the run removes at its end, even if workers die."""
    computing: int
    """Threads of a process that compute at once; the others wait for the store."""
    digested: tuple[int, ...]
    """Of each source the size of its file, if this share digests blocks of it; otherwise 0."""

    @property
    def packs(self) -> list[str]:
        """Names of the packs, one a key; where the first one stands, the unit is finished."""
        return [f"{self.unit.name}.{k}" for k in range(len(self.config.json_keys))]


def cached_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, built once a process."""
    with _building:
        if config not in _tools:
            _tools[config] = build_tokenizer(config)
        tokenizer: Tokenizer = _tools[config]
        return tokenizer


def cached_splitter(config: TokenizeConfig) -> SentenceSplitter | None:
    """What cuts texts into sentences, if anything does; built once a process."""
    if not config.split_sentences:
        return None
    with _building:
        key = (config.lang, config.keep_newlines)
        if key not in _tools:
            _tools[key] = SentenceSplitter(*key)
        splitter: SentenceSplitter = _tools[key]
        return splitter


def _seats(count: int) -> threading.Semaphore:
    """Limits the threads of this process that compute at once: more would slow each other down, and
    each would need a separate cache of words in the tokenizer."""
    with _building:
        seats: threading.Semaphore = _tools.setdefault(count, threading.Semaphore(count))
        return seats


def tokenize_unit(job: TokenizeJob) -> int:
    """Write the unit's packs; returns its number of documents."""
    with ExitStack() as stack:
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=UNIT, dir=job.scratch, ignore_cleanup_errors=True)
        )
        # Closed in reverse: the first key's pack, which makes the unit finished, appears last.
        sinks = [stack.enter_context(_Sink(job, name)) for name in job.packs]
        work = _Work(job, sinks, Path(scratch))
        for i in range(len(job.unit.sources)):
            work.read(i)
        work.finish()
    return work.summary.documents


@contextmanager
def _turn(job: TokenizeJob, block: DocumentColumns) -> Iterator[None]:
    """Wait for one's turn with large texts, among all threads of all workers."""
    if sum(len(text) for texts in block.texts for text in texts) < LARGE_LETTERS:
        yield
        return
    with Path(job.scratch, LARGE_TEXT_LOCK).open("wb") as file:
        # Unlocked when it is closed, or its process is gone.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Sink:
    """A pack being written to the store, and beside it on this machine where the store is remote:
    what lays the packs end to end then need not fetch them."""

    def __init__(self, job: TokenizeJob, name: str) -> None:
        self._output: OutputFile = store.open_output(store.join(job.work_url, name))
        self._copy: IO[bytes] | None = None
        if job.copies is not None:
            self._copy = Path(job.copies, name).open("wb")  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> None:
        self._output.write(data)
        if self._copy is not None:
            self._copy.write(data)

    def tell(self) -> int:
        return self._output.tell()

    def __enter__(self) -> _Sink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._copy is not None:
            self._copy.close()
        self._output.__exit__(kind, error, trace)


class _Work:
    """A unit while it is read."""

    def __init__(self, job: TokenizeJob, sinks: list[_Sink], scratch: Path) -> None:
        self._job, self._config, self._sinks = job, job.config, sinks
        self._tokenizer = cached_tokenizer(job.config.tokenizer)
        self._splitter = cached_splitter(job.config)
        dtype = optimal_dtype(self._tokenizer.vocab_size)
        self._writers = [IndexedWriter(sink, dtype) for sink in sinks]
        self._origins = ProvenanceWriter(scratch)
        self._bad = (scratch / "bad").open("w+b")
        self.summary = Summary(dtype=dtype.str)

    def read(self, i: int) -> None:
        """The documents of source number `i`."""
        source = self._job.unit.sources[i]
        config, size = self._config, self._job.digested[i]
        digests = RangeDigests(source.url, source.start, source.end, size) if size else None
        reader = DocumentReader(
            source,
            config.json_keys,
            id_key=config.id_key or None,
            on_bad_line=config.on_bad_line,
            splitter=self._splitter,
            advice=ADVICE,
            max_bytes=config.max_document_bytes,
            passing=digests.pass_by if digests else None,
        )
        blocks = reader.blocks()
        block = next(blocks, None)  # waits for the store, where its bytes come from one
        with _seats(self._job.computing):
            while block is not None:
                self._add(i, block, reader)
                block = None  # before there is another
                block = next(blocks, None)
        self._record_bad(i, reader)
        self.summary.lines.append(reader.lines)
        self.summary.digests.append(digests.finish() if digests else [])

    def _add(self, i: int, block: DocumentColumns, reader: DocumentReader) -> None:
        with _turn(self._job, block):
            block = self._encode(block, reader)
        self._validate(i, block, reader)
        self._origins.add_block(canonical(self._job.unit.sources[i].url), block)
        self.summary.documents += len(block)
        self._record_bad(i, reader)

    def _encode(self, block: DocumentColumns, reader: DocumentReader) -> DocumentColumns:
        """Write the tokens of a block; returns it, less what the tokenizer refuses."""
        try:
            columns = self._columns(block)  # of all keys first: a document is whole or left out
        except Exception as error:
            block = _blame(self._tokenizer, block, reader, error)
            if not len(block):
                return block
            columns = self._columns(block)
        for writer, one in zip(self._writers, columns, strict=True):
            writer.add_flat(one.ids, one.sequence_lengths, one.sequences_per_document)
        return block

    def _columns(self, block: DocumentColumns) -> list[Encoded]:
        eod = self._tokenizer.eod if self._config.append_eod else None
        columns = []
        for k in range(len(self._writers)):
            check_stop()
            columns.append(encode_block(self._tokenizer, block, k, eod))
        return columns

    def _validate(self, i: int, block: DocumentColumns, reader: DocumentReader) -> None:
        fraction = self._config.validate_tokenizer
        if not fraction:
            return
        chosen = np.flatnonzero(sampled(block, self._job.unit.files[i], fraction)).tolist()
        if not chosen:
            return
        wanted = set(chosen)
        documents = [doc for d, doc in enumerate(block.documents()) if d in wanted]
        self.summary.validated += len(documents)
        found = None
        for document in documents:
            try:
                found = found or find_difference(self._tokenizer, [document])
            except DataError as error:
                place = reader.place(document.line, document.offset)
                raise DataError(f"{place}: --validate-tokenizer: {error}") from error
        if found is None:
            return
        where = found.document
        place = reader.place(where.line, where.offset)
        named = "" if where.id is None else f" of id {where.id!r}"
        raise DataError(
            f"{place}: the document{named}, key {self._config.json_keys[found.k]!r}: "
            f"{found.words}; the engine is {self._tokenizer.engine}. Nothing was published; "
            "--no-use-gigatoken encodes with the reference library"
        )

    def _record_bad(self, i: int, reader: DocumentReader) -> None:
        for bad in sorted(reader.bad):
            self._bad.write(json.dumps({"range": i, **bad._asdict()}).encode() + b"\n")
        self.summary.bad_lines += len(reader.bad)
        reader.bad.clear()  # there may be more of them than fit in memory

    def finish(self) -> None:
        """What follows the tokens in each pack."""
        for k in reversed(range(len(self._sinks))):
            self._finish_one(k)
        self._bad.close()

    def _finish_one(self, k: int) -> None:
        sink, writer, summary = self._sinks[k], self._writers[k], self.summary
        summary.sequences, summary.tokens = writer.num_sequences, writer.num_tokens
        summary.bin_bytes = writer.num_tokens * writer.dtype.itemsize
        writer.write_index(sink)
        summary.idx_bytes = sink.tell() - summary.bin_bytes
        if k == 0:
            before = sink.tell()
            self._origins.write(sink)
            summary.docs_bytes, before = sink.tell() - before, sink.tell()
            self._bad.seek(0)
            while piece := self._bad.read(store.CHUNK):
                sink.write(piece)
            summary.bad_bytes = sink.tell() - before
        summary.write(sink)


def _blame(
    tokenizer: Tokenizer, block: DocumentColumns, reader: DocumentReader, error: Exception
) -> DocumentColumns:
    """The block without the documents that cannot be encoded by themselves; they become bad lines.

    Raises `error` when there are none, or when no document caused it."""
    _check_fault(error)
    bad, kept = [], []
    for d, document in enumerate(block.documents()):
        fault = _refusal(tokenizer, document)
        if fault is None:
            kept.append(d)
        else:
            bad.append(fault)
    if not bad:
        raise error
    reader.refuse(bad)
    return block.only(kept)


def _refusal(tokenizer: Tokenizer, document: Document) -> BadLine | None:
    for texts in document.values:
        try:
            tokenizer.encode_flat(texts)
        except Exception as error:
            _check_fault(error)
            begins = excerpt(next(filter(None, texts), ""))
            reason = f"cannot be tokenized: {error}"
            return BadLine(document.line, document.offset, reason, begins)
    return None


def _check_fault(error: Exception) -> None:
    """Raise what no text is to blame for."""
    if isinstance(error, MemoryError | OSError) or (
        isinstance(error, TrainyardError) and not isinstance(error, DataError)
    ):
        raise error
