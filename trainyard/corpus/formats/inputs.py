"""Known file formats, and the byte ranges that files are cut into.

A file's extension gives its format; a second extension gives its compression. A unit of work is a
range of an uncompressed JSONL file, one or more whole row groups of a Parquet file, or a whole
file of any other kind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from trainyard.artifacts import store
from trainyard.artifacts.block_digest import BLOCK_BYTES
from trainyard.corpus.formats.compression import CODECS
from trainyard.corpus.formats.records import ByteRange
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet"}
"""The format of a file, by the ending of its name."""

LABELS = {"jsonl": "JSONL", "text": "plain text", "parquet": "Parquet"}

SHOWN_FILES = 8


def split_name(url: str, option: str = "--input") -> tuple[str, str]:
    """Format and compression of a file, such as ("jsonl", ".gz"); ConfigError if unknown."""
    name = store.basename(url)
    compression = next((ending for ending in CODECS if name.endswith(ending)), "")
    inner = name.removesuffix(compression)
    for ending, kind in FORMATS.items():
        if inner.endswith(ending) and not (kind == "parquet" and compression):
            return kind, compression
    raise ConfigError(
        f"{option}: {url} must end in one of {', '.join(FORMATS)}; all but .parquet may have "
        f"{', '.join(CODECS)} after that; rename it or leave it out"
    )


def check_inputs(
    urls: Sequence[str], files: Sequence[str], keys: Sequence[str], option: str = "--input"
) -> tuple[str, ...]:
    """The files to read, in order, without markers of other programs, such as `_SUCCESS`.

    Refuses unknown files, and different kinds in one folder.

    urls: as given on the command line, with `option`. files: the files that they name."""
    asked = {url.rstrip("/") for url in urls}
    kept = tuple(file for file in files if not is_aside(file, asked))
    if len(kept) < len(files):
        passed = sorted(set(files).difference(kept))
        more = f" and {len(passed) - SHOWN_FILES} more" if len(passed) > SHOWN_FILES else ""
        shown = ", ".join(passed[:SHOWN_FILES])
        log.info("%s: skipped names that begin with _ or a dot: %s%s", option, shown, more)
    _check_kinds(asked, kept, keys, option)
    return kept


def is_aside(file: str, asked: set[str]) -> bool:
    """Whether a name below a given folder begins with _ or a dot."""
    path, aside = file, False
    while "/" in path and path not in asked:
        path, _, name = path.rpartition("/")
        aside = aside or name.startswith(("_", "."))
    return aside and path in asked


def _check_kinds(asked: set[str], files: Sequence[str], keys: Sequence[str], option: str) -> None:
    kinds = {file: split_name(file, option)[0] for file in files}
    examples: dict[str, str] = {}
    for file in files:
        if file not in asked:
            examples.setdefault(kinds[file], file)
    if len(examples) > 1:
        (a, first), (b, second) = itertools.islice(examples.items(), 2)
        raise ConfigError(
            f"{option} finds both {LABELS[a]} ({first}) and {LABELS[b]} ({second}); choose one by "
            "a pattern, such as 'corpus/*.jsonl'"
        )
    if "text" in kinds.values() and len(keys) > 1:
        raise ConfigError(
            "--json-keys: plain text has no keys; give one key, used as its name only"
        )


def split_ranges(url: str, end: int, unit_bytes: int, start: int = 0) -> list[ByteRange]:
    """The units of a file of `end` bytes, without gap or overlap; none for an empty file. start: of
    a range that this function cut before, to be cut further.

    For JSONL, nearly equal ranges of at most `unit_bytes`, and of whole blocks (`block_digest`) if
    those are smaller, so that who reads a range can digest its blocks. For Parquet, whose footer is
    read, consecutive row groups of at most that size together, or one larger one."""
    kind, compression = split_name(url)
    if start == end:
        return []
    if kind == "jsonl" and not compression:
        atom = BLOCK_BYTES if unit_bytes >= BLOCK_BYTES else 1
        atoms = -(-(end - start) // atom)
        pieces = -(-atoms // (unit_bytes // atom))
        bounds = [min(start + atoms * i // pieces * atom, end) for i in range(pieces + 1)]
    elif kind == "parquet":
        bounds = _parquet_bounds(url, start, end, unit_bytes)
    else:
        bounds = [start, end]
    return [ByteRange(url, a, b) for a, b in itertools.pairwise(bounds)]


def _parquet_bounds(url: str, start: int, end: int, unit_bytes: int) -> list[int]:
    from trainyard.corpus.formats.parquet import row_groups

    bounds = [start]
    filled = 0
    for group in row_groups(url):
        if not start <= group.offset < end:
            continue
        if filled and filled + group.size_bytes > unit_bytes and group.offset > bounds[-1]:
            bounds.append(group.offset)
            filled = 0
        filled += group.size_bytes
    return [*bounds, end]
