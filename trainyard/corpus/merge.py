"""Several pairs of token files to one, as streams: memory does not grow with the data.

The .bin files are laid end to end in the order given; of the indices, offsets and document bounds
are shifted. Merging the parts of a corpus gives the bytes that the whole gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.artifacts import store
from trainyard.corpus.indexed import map_file, read_index
from trainyard.corpus.layout import (
    ByteSink,
    Index,
    parse_index,
    write_array,
    write_header,
    write_offsets,
)
from trainyard.errors import ArtifactError

PAIR = (".bin", ".idx")
OURS = ("manifest.json", "claim.json", "failure.json")
"""What stages put beside their outputs; passed over."""


@dataclass(frozen=True, slots=True)
class Part:
    """One pair to be merged. Its index is mapped again when needed, not held: a process may have
    no more than some hundred files open."""

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    bin_bytes: int
    is_multimodal: bool


def find_pairs(files: Sequence[str], folder: str) -> list[str]:
    """Prefixes of the pairs that lie in `folder` itself, sorted; `files` is everything below it.

    Hidden files, manifests and subfolders are passed over. Raises ArtifactError for half a pair,
    for a file that is neither, and for no pair at all."""
    root = folder.rstrip("/") + "/"
    names = [file.removeprefix(root) for file in files if file.startswith(root)]
    names = [n for n in names if "/" not in n and not n.startswith(".") and not n.endswith(OURS)]
    stray = [name for name in names if not name.endswith(PAIR)]
    if stray:
        raise ArtifactError(
            f"{root}{stray[0]} is no half of a .bin/.idx pair; a folder to merge holds nothing else"
        )
    have = set(names)
    for name in sorted(have):
        other = name[:-4] + PAIR[name.endswith(".bin")]
        if other not in have:
            raise ArtifactError(f"{root}{name} has no {other} beside it: half a pair")
    if not have:
        raise ArtifactError(f"{folder}: no .bin/.idx pair lies there")
    return [root + name[:-4] for name in sorted(have) if name.endswith(".bin")]


def survey(prefixes: Sequence[str], cache: Path) -> list[Part]:
    """Check every pair whole, and all against each other, before anything is written.

    An .idx of a remote store is copied to the folder `cache`."""
    parts = [_survey_one(prefix, cache) for prefix in prefixes]
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype:
            raise ArtifactError(
                f"{part.prefix} stores {part.dtype}, {first.prefix} stores {first.dtype}: "
                "one file has one type; tokenize them with the same tokenizer"
            )
        if part.is_multimodal != first.is_multimodal:
            one, other = (p.prefix for p in sorted((part, first), key=lambda p: p.is_multimodal))
            raise ArtifactError(f"{one} is text alone, {other} is multimodal: they do not mix")
    return parts


def _survey_one(prefix: str, cache: Path) -> Part:
    index = read_index(prefix, cache)
    return Part(
        prefix,
        index.dtype,
        len(index.sequence_lengths),
        len(index.document_indices) - 1,
        index.bin_bytes,
        index.modes is not None,
    )


def merge_tokens(
    parts: Sequence[Part], out: ByteSink, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Lay the .bin files end to end; `on_bytes` is told of each piece written."""
    for part in parts:
        copied = 0
        with store.open_input(part.prefix + ".bin") as source:
            while piece := source.read(store.CHUNK):
                out.write(piece)
                copied += len(piece)
                on_bytes(len(piece))
        if copied != part.bin_bytes:
            raise ArtifactError(f"{part.prefix}.bin changed its size while it was being read")


def merge_index(parts: Sequence[Part], cache: Path, out: ByteSink) -> None:
    """The .idx of the merged tokens."""
    num_bounds = 1 + sum(part.num_documents for part in parts)
    write_header(out, parts[0].dtype, sum(part.num_sequences for part in parts), num_bounds)
    for part in parts:
        write_array(out, _map(part, cache).sequence_lengths, "<i4")
    end = 0
    for part in parts:
        end = write_offsets(out, _map(part, cache).sequence_lengths, part.dtype.itemsize, end)
    write_array(out, np.zeros(1), "<i8")
    shift = 0
    for part in parts:
        write_array(out, _map(part, cache).document_indices[1:], "<i8", shift)
        shift += part.num_sequences
    for part in parts if parts[0].is_multimodal else ():
        modes = _map(part, cache).modes
        if modes is not None:
            write_array(out, modes, "i1")


def _map(part: Part, cache: Path) -> Index:
    name = part.prefix + ".idx"
    return parse_index(map_file(store.fetch(name, cache)), name)
