"""Which pairs of token files stand behind what a person named: folders, patterns, prefixes, files.

Pure functions of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from trainyard.artifacts.output import is_housekeeping
from trainyard.artifacts.urls import has_glob, local_path
from trainyard.errors import ArtifactError, ConfigError

PAIR = (".bin", ".idx")
DOCS = ".docs"
"""The provenance sidecar of a pair."""

BAD_LINES = ".bad_lines.jsonl"
"""The lines that were left out."""

SHARE = ".share.json"
"""What a share of token files says of itself."""

BESIDE = (".failure.json", BAD_LINES, SHARE)
"""What stages leave beside pairs, besides manifests, claims and unfinished work."""


def find_pairs(entries: Sequence[str], files: Sequence[str]) -> list[str]:
    """Prefixes of the pairs, in the order of `entries`, sorted within a folder or a pattern.

    `files` is everything that the entries stand for. Raises ArtifactError for half a pair, for a
    stray file and for no pair at all; ConfigError for a pair that is named twice."""
    known = set(files)
    found: list[str] = []
    for entry in entries:
        if has_glob(entry):
            found += _matching(entry, known)
        elif any(entry + ending in known for ending in PAIR):
            found.append(_whole(entry, known))
        else:
            found += pairs_of_folder(entry, known)
    seen: set[str] = set()
    for prefix in found:
        if prefix in seen:
            raise ConfigError(f"--input names {prefix} twice; its documents would be there twice")
        seen.add(prefix)
    return found


def pairs_of_folder(folder: str, files: Collection[str]) -> list[str]:
    """Prefixes of the pairs directly in a folder, sorted; `files` is everything below it.

    Hidden files, subfolders and what stages leave beside pairs are passed over."""
    root = folder.rstrip("/") + "/"
    names = [file.removeprefix(root) for file in files if file.startswith(root)]
    names = [name for name in names if "/" not in name and not _is_beside(name)]
    stray = sorted(name for name in names if not name.endswith((*PAIR, DOCS)))
    if stray:
        raise ArtifactError(
            f"{root}{stray[0]} is no half of a .bin/.idx pair; a folder to merge holds nothing else"
        )
    if not names:
        raise ArtifactError(f"{folder}: no .bin/.idx pair lies there{_meant(folder, files)}")
    return _pairs_among([root + name for name in names], files, folder)


def _meant(prefix: str, files: Collection[str]) -> str:
    """For who named the prefix of a run, whose pairs have longer ones."""
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
        raise ArtifactError(f"{where}: no .bin/.idx pair lies there")
    return [_whole(prefix, files) for prefix in sorted({stem(name) for name in names})]


def _whole(prefix: str, files: Collection[str]) -> str:
    have = [prefix + ending for ending in (*PAIR, DOCS) if prefix + ending in files]
    for ending in PAIR:
        if prefix + ending not in have:
            name = (prefix + ending).rpartition("/")[2]
            raise ArtifactError(f"{have[0]} has no {name} beside it: half a pair")
    return prefix


def stem(name: str) -> str:
    """A name without its ending, if that is one of a pair's."""
    for ending in (*PAIR, DOCS):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def _is_beside(name: str) -> bool:
    return name.startswith(".") or is_housekeeping(name) or name.endswith(BESIDE)
