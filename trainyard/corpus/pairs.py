"""Finds the pairs of token files that folders, patterns, prefixes or files name.

Pure functions of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from trainyard.artifacts.output import PARTS, is_housekeeping
from trainyard.artifacts.urls import has_glob, local_path
from trainyard.errors import ArtifactError, ConfigError

PAIR = (".bin", ".idx")
DOCS = ".docs"
"""The provenance sidecar of a pair."""

SUMS = ".sums"
"""Ending of the digests of the blocks of a .bin (`sums`)."""

BAD_LINES = ".bad_lines.jsonl"
"""Ending of the list of skipped lines."""

SHARE = ".share.json"
"""Ending of the description of a share of token files."""

BLOCKS = ".blocks.json"
"""Ending of what such a share says of the input that it read."""

BESIDE = (".failure.json", BAD_LINES, SHARE, BLOCKS, SUMS)
"""Endings of other files that stages write next to pairs, apart from manifests, claims and
unfinished work."""


def find_pairs(entries: Sequence[str], files: Sequence[str]) -> list[str]:
    """Prefixes of the pairs, in the order of `entries`, sorted within a folder or a pattern. An
    entry may be the prefix of a virtual dataset.

    files: every file below the entries. Raises ArtifactError for half a pair, a stray file or no
    pair at all, and ConfigError for a pair that is named twice."""
    known = set(files)
    found: list[str] = []
    for entry in entries:
        if has_glob(entry):
            found += _matching(entry, known)
        elif any(entry + ending in known for ending in PAIR):
            found.append(_whole(entry, known))
        elif entry.removesuffix(PARTS) + PARTS in known:
            found.append(entry.removesuffix(PARTS))
        else:
            found += pairs_of_folder(entry, known)
    seen: set[str] = set()
    for prefix in found:
        if prefix in seen:
            raise ConfigError(f"--input names {prefix} twice; its documents would occur twice")
        seen.add(prefix)
    return found


def pairs_of_folder(folder: str, files: Collection[str]) -> list[str]:
    """Prefixes of the pairs directly in a folder, sorted. files: every file below it.

    Skips hidden files, subfolders and other files that stages write next to pairs."""
    root = folder.rstrip("/") + "/"
    names = [file.removeprefix(root) for file in files if file.startswith(root)]
    names = [name for name in names if "/" not in name and not _is_beside(name)]
    stray = sorted(name for name in names if not name.endswith((*PAIR, DOCS)))
    if stray:
        raise ArtifactError(
            f"{root}{stray[0]} is not half of a .bin/.idx pair; a folder of parts must contain "
            "only pairs"
        )
    if not names:
        raise ArtifactError(f"{folder}: has no .bin/.idx pair{_meant(folder, files)}")
    return _pairs_among([root + name for name in names], files, folder)


def _meant(prefix: str, files: Collection[str]) -> str:
    """A hint for a prefix of --output-prefix, whose pairs have longer prefixes; or ""."""
    longer = sorted({stem(file) for file in files if file.startswith(f"{prefix}_")})
    return f"; did you mean {' '.join(longer)}?" if longer else ""


def _matching(pattern: str, files: Collection[str]) -> list[str]:
    path = local_path(pattern)
    wanted = (pattern if path is None else str(path)).split("/")

    def is_meant(prefix: str) -> bool:
        parts = prefix.split("/")
        if "**" in wanted:
            return fnmatch.fnmatchcase(prefix, "/".join(wanted))
        return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))

    named = [file for file in files if file.endswith((*PAIR, DOCS))]
    return _pairs_among([file for file in named if is_meant(stem(file))], files, pattern)


def _pairs_among(names: Sequence[str], files: Collection[str], where: str) -> list[str]:
    if not names:
        raise ArtifactError(f"{where}: has no .bin/.idx pair")
    return [_whole(prefix, files) for prefix in sorted({stem(name) for name in names})]


def _whole(prefix: str, files: Collection[str]) -> str:
    have = [prefix + ending for ending in (*PAIR, DOCS) if prefix + ending in files]
    for ending in PAIR:
        if prefix + ending not in have:
            name = (prefix + ending).rpartition("/")[2]
            raise ArtifactError(f"{have[0]} has no {name} beside it: half a pair")
    return prefix


def stem(name: str) -> str:
    """A name without the ending of a pair's file, if it has one."""
    for ending in (*PAIR, DOCS):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def _is_beside(name: str) -> bool:
    return name.startswith(".") or is_housekeeping(name) or name.endswith(BESIDE)
