"""Input files to documents, by byte range.

A document is one line of a JSONL file (`.jsonl`, or `.json` with an object a line) or a whole plain
text file (`.txt`); either may be gzipped (`.gz`). A `ByteRange` is the documents that begin within
some bytes of one file, so that any number of readers share a large file and see the same ones.
Blank lines are no documents. Every fault names file, line and byte. Knows nothing of tokens."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from trainyard.artifacts import store
from trainyard.errors import ConfigError, DataError

FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text"}
"""What a file holds, by the ending of its name."""

COMPRESSIONS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
}
"""How a compressed file is opened, by the last ending of its name."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EXCERPT = 60


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The documents whose first byte lies in [start, end) of one file."""

    url: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the file it covers, as stored."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Document:
    """One document: for each key asked for, its sentences (a plain string is one sentence)."""

    offset: int
    """Where it begins in the file (after decompression)."""
    values: tuple[tuple[str, ...], ...]


# --- which files, which ranges ----------------------------------------------------------------


def split_name(url: str) -> tuple[str, str]:
    """What a file holds and how it is compressed: ("jsonl", ".gz"); ConfigError when unknown."""
    name = store.basename(url)
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    inner = name.removesuffix(compression)
    for ending, held in FORMATS.items():
        if inner.endswith(ending):
            return held, compression
    known = [f + c for f in FORMATS for c in ("", *COMPRESSIONS)]
    raise ConfigError(
        f"--input: {url} ends in none of the known {', '.join(known)}; rename or leave it out"
    )


def check_inputs(urls: Sequence[str], files: Sequence[str], keys: Sequence[str]) -> None:
    """Refuse files that cannot be meant: unknown kinds, or text and JSONL mixed in a folder."""
    kinds = {file: split_name(file)[0] for file in files}
    found = [file for file in files if file not in urls]
    if len({kinds[file] for file in found}) > 1:
        jsonl, text = (next(f for f in found if kinds[f] == kind) for kind in ("jsonl", "text"))
        raise ConfigError(
            f"--input finds both JSONL ({jsonl}) and plain text ({text}): say which by a pattern, "
            "such as 'corpus/*.jsonl'"
        )
    if "text" in kinds.values() and len(keys) > 1:
        raise ConfigError(
            "--json-keys: plain text has no keys; give one key, used as its name only"
        )


def split_ranges(url: str, size_bytes: int, unit_bytes: int) -> list[ByteRange]:
    """Nearly equal ranges of at most `unit_bytes` that cover a file; one range if not of lines."""
    held, compression = split_name(url)
    if size_bytes == 0:
        return []
    pieces = -(-size_bytes // unit_bytes) if held == "jsonl" and not compression else 1
    bounds = [size_bytes * i // pieces for i in range(pieces + 1)]
    return [ByteRange(url, a, b) for a, b in itertools.pairwise(bounds)]


# --- reading ----------------------------------------------------------------------------------


def read_documents(source: ByteRange, keys: Sequence[str]) -> Iterator[Document]:
    """The documents of a range, in order. Raises DataError naming file, line and byte."""
    held, _ = split_name(source.url)
    if held == "text":
        yield _read_text(source, len(keys))
        return
    for offset, line in _lines(source):
        if not line.strip():
            continue
        try:
            yield Document(offset, _values(line, keys))
        except _FaultError as fault:
            raise DataError(
                f"{locate(source.url, offset)}: {fault}; it begins {_excerpt(line)}"
            ) from None


def locate(url: str, offset: int) -> str:
    """`FILE: line N (byte B)`; reads the file up to there, so only for errors."""
    number = 1
    with _open(url) as file:
        left = offset
        while left and (piece := file.read(min(left, store.CHUNK))):
            number += piece.count(b"\n")
            left -= len(piece)
    return f"{url}: line {number} (byte {offset})"


class _FaultError(Exception):
    """What is wrong with a line; the place is added by whoever knows it."""


def _open(url: str) -> BinaryIO:
    _, compression = split_name(url)
    file = store.open_input(url)
    return COMPRESSIONS[compression](file) if compression else file


def _lines(source: ByteRange) -> Iterator[tuple[int, bytes]]:
    compressed = bool(split_name(source.url)[1])
    with _open(source.url) as file:
        offset = 0
        if source.start:
            file.seek(source.start - 1)
            offset = (
                source.start - 1 + len(file.readline())
            )  # the rest of a line that began before us
        while compressed or offset < source.end:
            try:
                line = file.readline()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(
                    f"{source.url}: broken after byte {offset} of its contents: {error}"
                ) from None
            if not line:
                return
            yield offset, line
            offset += len(line)


def _values(line: bytes, keys: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    try:
        record = json.loads(_decode(line))
    except (ValueError, RecursionError) as error:
        raise _FaultError(f"not a JSON document ({error})") from None
    if not isinstance(record, dict):
        raise _FaultError(
            f"a JSON {_kind(record)} where an object with the keys {list(keys)} should be"
        )
    values = tuple(_sentences(record, key) for key in keys)
    if b"\\ud" in line or b"\\uD" in line:
        _check_surrogates(values)
    return values


def _sentences(record: dict[str, Any], key: str) -> tuple[str, ...]:
    if key not in record:
        raise _FaultError(f"no key {key!r}, only {sorted(record)}; see --json-keys")
    value = record[key]
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise _FaultError(f"key {key!r} holds a JSON {_kind(value)}, not a string or a list of strings")


def _decode(data: bytes) -> str:
    try:
        return data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise _FaultError(
            f"not UTF-8 ({error.reason} at byte {error.start} of the document)"
        ) from None


def _check_surrogates(values: tuple[tuple[str, ...], ...]) -> None:
    for sentences in values:
        for text in sentences:
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise _FaultError("an escape \\ud... that is half a character (a lone surrogate)")


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _excerpt(line: bytes) -> str:
    text = line[:EXCERPT].decode(errors="replace").rstrip("\r\n")
    return ascii(text + ("..." if len(line) > EXCERPT else ""))


def _read_text(source: ByteRange, num_keys: int) -> Document:
    try:
        with _open(source.url) as file:
            return Document(0, ((_decode(file.read()),),) * num_keys)
    except _FaultError as fault:
        raise DataError(f"{source.url}: {fault}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{source.url}: broken: {error}") from None
