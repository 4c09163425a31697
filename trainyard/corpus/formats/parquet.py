"""Reads records from Parquet files, one row group at a time. The only module that imports pyarrow.

A column is a key. Rows are read in batches of about a megabyte, so a row group need not fit in
memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from trainyard.artifacts import store
from trainyard.corpus.formats.bounds import too_large
from trainyard.corpus.formats.parse import excerpt, written
from trainyard.corpus.formats.records import BadLine, ByteRange, Rows
from trainyard.errors import ConfigError, DataError

T = TypeVar("T")

MAGIC = b"PAR1"
"""The first bytes of a file."""

LOT_BYTES = 1 << 20
LOT_ROWS = 1024
"""Most rows of a batch: with a dictionary, a long text that repeats looks small in the footer."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group, as the footer describes it."""

    number: int
    offset: int
    size_bytes: int
    """As stored, all columns."""
    num_rows: int


class _BrokenError(Exception):
    """pyarrow could not read the rest of a row group."""


def row_groups(url: str) -> list[RowGroup]:
    """The row groups of a file that have rows, in the order of the file."""
    found = store.info(url)
    return _row_groups_of(url, found.size_bytes, found.version)


@lru_cache(maxsize=64)
def _row_groups_of(url: str, size_bytes: int, version: str | None) -> list[RowGroup]:
    """Those of a version: each range that is cut further asks for them."""
    with _opened(url) as (file, size):
        return _footer(url, lambda: _row_groups(file, size))


def parquet_rows(
    source: ByteRange, keys: Sequence[str], id_key: str | None, max_bytes: int
) -> Iterator[Rows]:
    """The rows of the row groups that begin in a range; one with texts of more than `max_bytes` is
    a bad line."""
    with _opened(source.url) as (file, size):
        groups = _footer(source.url, lambda: _row_groups(file, size))
        columns = _footer(source.url, lambda: _columns(file, source.url, keys, id_key))
        total = 0
        for group in groups:
            if source.start <= group.offset < source.end:
                for rows in _group_rows(file, group, columns, total + 1, keys[0], max_bytes):
                    yield rows
                    total += rows.num_lines


def _group_rows(
    file: Any, group: RowGroup, columns: list[str], first: int, shown: str, max_bytes: int
) -> Iterator[Rows]:
    """The rows of a row group. first: number of its first row in the range.

    If the rest cannot be read, it becomes one bad line, which counts the lost rows."""
    done = 0
    try:
        stored = _arrow(lambda: _stored_bytes(file, group, columns))
        if group.num_rows == 1 and stored > max_bytes + LOT_BYTES:  # more than the text's overhead
            yield _no_rows(BadLine(first, group.offset, too_large(max_bytes, "the row"), ""), 1)
            return
        batches = _arrow(lambda: _batches(file, group, columns))
        while (batch := _arrow(lambda: next(batches, None))) is not None:
            yield _rows(batch, group, first + done, shown, max_bytes)
            done += batch.num_rows
        if done != group.num_rows:  # damaged pages end without an error
            raise _BrokenError(f"its pages have {done} rows, but its footer says {group.num_rows}")
    except _BrokenError as error:
        lost = max(group.num_rows - done, 0)
        reason = (
            f"the rest of the row group cannot be read ({error}); {lost} of its {group.num_rows} "
            "rows are lost"
        )
        yield _no_rows(BadLine(first + done, group.offset, reason, ""), lost)


def _no_rows(bad: BadLine, count: int) -> Rows:
    nothing = np.empty(0, np.int64)
    return Rows([], nothing, nothing, nothing, count, [bad], lambda _: "", [])


def _rows(batch: Any, group: RowGroup, first: int, shown: str, max_bytes: int) -> Rows:
    bad: list[BadLine] = []
    try:
        if batch.nbytes > max_bytes:
            raise OverflowError  # check each row separately
        records = _as_text(batch).to_pylist()
        numbers = np.arange(first, first + len(records))
    except (ValueError, OverflowError):
        # Arrow does not check text for UTF-8, and a date may be outside Python's range.
        records, kept = [], []
        for i in range(batch.num_rows):
            try:
                if _text_bytes(batch.slice(i, 1)) > max_bytes:
                    bad.append(
                        BadLine(first + i, group.offset, too_large(max_bytes, "the row"), "")
                    )
                    continue
                records += _as_text(batch.slice(i, 1)).to_pylist()
                kept.append(first + i)
            except (ValueError, OverflowError) as error:
                plain = type(error) in (ValueError, OverflowError)  # subclasses concern text
                reason = f"{'out of range' if plain else 'not UTF-8'} ({error})"
                bad.append(BadLine(first + i, group.offset, reason, ""))
        numbers = np.array(kept, np.int64)
    return Rows(
        records,
        np.full(len(records), group.offset),
        np.full(len(records), group.size_bytes),
        numbers,
        batch.num_rows,
        bad,
        lambda i: excerpt(written(records[i][shown])[: 1 << 10]),
        [],
    )


def _text_bytes(row: Any) -> int:
    """Bytes of the texts of one row, including lists of texts."""
    import pyarrow as arrow  # type: ignore[import-untyped]
    import pyarrow.compute as compute  # type: ignore[import-untyped]

    total = 0
    for column in row.columns:
        while arrow.types.is_list(column.type) or arrow.types.is_large_list(column.type):
            column = column.flatten()
        with suppress(arrow.ArrowNotImplementedError):  # not text: `check_record` refuses it
            total += compute.sum(compute.binary_length(column)).as_py() or 0
    return total


def _as_text(batch: Any) -> Any:
    """Converts columns of bytes, which some writers use for text; ValueError if not UTF-8."""
    import pyarrow as arrow

    for i, field in enumerate(batch.schema):
        if arrow.types.is_binary(field.type) or arrow.types.is_large_binary(field.type):
            text = batch.column(i).cast(arrow.large_string())
            batch = batch.set_column(i, field.name, text)
    return batch


def _batches(file: Any, group: RowGroup, columns: list[str]) -> Iterator[Any]:
    size = _stored_bytes(file, group, columns)
    rows = int(max(1, min(LOT_ROWS, group.num_rows * LOT_BYTES // max(size, 1))))
    batches: Iterator[Any] = file.iter_batches(
        rows, row_groups=[group.number], columns=columns, use_threads=False
    )
    return batches


def _stored_bytes(file: Any, group: RowGroup, columns: list[str]) -> int:
    """Bytes of some columns of a row group before compression, from the footer."""
    metadata = file.metadata.row_group(group.number)
    chunks = [metadata.column(i) for i in range(metadata.num_columns)]
    read = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    return sum(chunk.total_uncompressed_size for chunk in read)


def _columns(file: Any, url: str, keys: Sequence[str], id_key: str | None) -> list[str]:
    schema = file.schema_arrow
    for key in keys:
        if schema.get_all_field_indices(key) == []:
            raise DataError(
                f"{url}: no column {key!r}, only {', '.join(schema.names)}; see --json-key"
            )
    wanted = [*keys, id_key] if id_key in schema.names and id_key not in keys else list(keys)
    for name in wanted:
        if len(schema.get_all_field_indices(name)) > 1:
            raise DataError(f"{url}: there is more than one column {name!r}")
    return [name for name in wanted if name is not None]


def _row_groups(file: Any, file_bytes: int) -> list[RowGroup]:
    found = []
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        if group.num_rows and chunks:
            offset = min(c.dictionary_page_offset or c.data_page_offset for c in chunks)
            size = sum(c.total_compressed_size for c in chunks)
            if not len(MAGIC) <= offset < file_bytes:  # it would be in no range
                raise _BrokenError(f"row group {number} begins at byte {offset} of {file_bytes}")
            found.append(RowGroup(number, offset, size, group.num_rows))
    return sorted(found, key=lambda group: group.offset)


@contextmanager
def _opened(url: str) -> Iterator[tuple[Any, int]]:
    """A file and its size in bytes."""
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "--input: .parquet files need the package pyarrow, which is not installed; "
            "run `pip install '.[tokenize]'` in the checkout"
        ) from error
    with store.operation("read", url) as backend, backend.open_input(url) as file:
        # Without pre_buffer=False, a whole row group is read before its first row.
        options = {"buffer_size": LOT_BYTES, "pre_buffer": False}
        size = file.seek(0, os.SEEK_END)
        yield _footer(url, lambda: parquet.ParquetFile(file, **options)), size


def _footer(url: str, call: Callable[[], T]) -> T:
    """Turns errors while the footer is read into DataError."""
    try:
        return _arrow(call)
    except _BrokenError as error:
        raise DataError(f"{url}: not a Parquet file, or a damaged one: {error}") from error


def _arrow(call: Callable[[], T]) -> T:
    """Turns errors that pyarrow finds in a file into _BrokenError.

    Errors of the store have an errno or another class, and pass through."""
    try:
        return call()
    except _BrokenError:
        raise
    except (ValueError, OverflowError, RuntimeError) as error:
        raise _BrokenError(" ".join(str(error).split())) from error
    except OSError as error:
        if type(error) is not OSError or error.errno is not None:
            raise
        raise _BrokenError(" ".join(str(error).split())) from error
    except Exception as error:
        if not type(error).__module__.startswith("pyarrow"):
            raise
        raise _BrokenError(" ".join(str(error).split())) from error
