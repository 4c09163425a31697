"""Where Megatron-LM's Retro tools (core 0.15) keep the indices of a project. Pure.

    index/TYPE/STR/empty_T.faissindex      trained on the share T of the sampled chunks
    index/TYPE/STR/added_T_A.faissindex    filled with the share A of each block of chunks

TYPE is faiss-par-add or faiss-base, STR the string for faiss's index_factory; shares have three
decimals. Ids are those of all chunks, so with A below 1 some are missing. The other folders are
those of our projects (`project`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trainyard.errors import ArtifactError, ConfigError

PAR_ADD = "faiss-par-add"

_SHARE = r"([01]\.[0-9]{3})"
_ADDED = re.compile(rf"([^/]+/([^/]+))/added_{_SHARE}_{_SHARE}\.faissindex\Z")


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """An index by the names of its files, below `index`."""

    folder: str
    """TYPE/STR"""
    index_str: str
    train_fraction: float
    add_fraction: float

    @property
    def added(self) -> str:
        """The filled index."""
        return f"{self.folder}/added_{self.train_fraction:.3f}_{self.add_fraction:.3f}.faissindex"

    @property
    def empty(self) -> str:
        """The trained index without vectors."""
        return f"{self.folder}/empty_{self.train_fraction:.3f}.faissindex"


def index_files(
    index_type: str, index_str: str, train_fraction: float, add_fraction: float
) -> IndexFiles:
    """The names for an index."""
    return IndexFiles(f"{index_type}/{index_str}", index_str, train_fraction, add_fraction)


def find_index(names: Iterable[str], chosen: str | None, where: str) -> IndexFiles | None:
    """The filled index among the files below `index`; None without any. chosen: its file, if there
    are several; ConfigError for none or for one that is not there."""
    found = {
        match[0]: IndexFiles(match[1], match[2], float(match[3]), float(match[4]))
        for name in sorted(names)
        if (match := _ADDED.match(name))
    }
    if chosen is not None and chosen not in found:
        raise ConfigError(
            f"--retro-index-file {chosen}: {where} has " + (", ".join(found) or "no filled index")
        )
    if chosen is None and len(found) > 1:
        raise ConfigError(
            f"{where} has several filled indices; choose one by --retro-index-file: "
            + ", ".join(found)
        )
    if chosen is None and not found:
        return None
    return found[chosen] if chosen is not None else next(iter(found.values()))


def check_share(index_str: str) -> str:
    """The string as the name of a folder."""
    if "/" in index_str or index_str in ("", ".", ".."):
        raise ArtifactError(f"index.json: {index_str!r} is no string for faiss's index_factory")
    return index_str
