"""Finds superseded versions of an index that grows with its corpus.

`flows.recipes.refresh_retro` has the layout: NAME/retro/current.json points to the database, the
embeddings and the index of NAME/retro/VERSION. A version grows by copy on write: its database and
its index hold all of the one before, but its embeddings only what is new. So each of these is kept
or removed by itself."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flows.gc.contents import Artifact, Contents
from flows.gc.policy import DAY, Policy, age
from flows.gc.references import Use
from flows.gc.versions import Old, Pointer, number_of, unit_of
from flows.recipes.corpus_versions import CURRENT
from flows.recipes.refresh_retro import RETRO, RetroVersion, read_retro_pointer
from trainyard.artifacts import store
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename, parent
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)

KIND = "index version"
VERSION_NAME = re.compile(r"\d{4,}-[0-9a-f]{12}-[0-9a-f]{12}")
"""Other folders there, such as those of build-retro, are no versions."""


@dataclass(frozen=True, slots=True)
class Index:
    """The index in one recipe's root."""

    current: RetroVersion
    pointer: Pointer

    def use(self) -> Use:
        """What the newest version consists of."""
        current = self.current
        urls = (current.database, *current.embeddings, current.index)
        return Use(self.pointer.name, urls)


def indices(contents: Contents) -> list[Index]:
    """Every pointer to a version of an index in the yard."""
    found = []
    for entry in contents.entries:
        folder, name = parent(entry.name), basename(entry.name)
        if name == CURRENT and basename(folder) == RETRO and _outputs(contents, folder):
            try:
                info = store.info(contents.url(entry.name))
                current, _ = read_retro_pointer(contents.url(entry.name))
            except ArtifactError as error:
                log.warning("%s; its index is left alone", error)
                continue
            if current is not None:
                found.append(Index(current, Pointer(folder, info, recipe=parent(folder))))
    return found


def old_of_index(contents: Contents, index: Index, policy: Policy) -> list[Old]:
    """The outputs in all versions but the newest, each a unit."""
    inside = _outputs(contents, index.pointer.folder)
    order = _published(contents, index, inside)
    current = f"{index.pointer.folder}/{basename(parent(index.current.index))}"
    newest = {current, *order[: policy.keep_corpus_versions]}
    found = []
    for version, artifacts in inside.items():
        if version in newest or contents.has_work_in(version):
            continue
        why = _why(contents, version, order, policy)
        if why is not None:
            found += [Old(KIND, unit_of(contents, a), why, index.pointer) for a in artifacts]
    return found


def _outputs(contents: Contents, folder: str) -> dict[str, list[Artifact]]:
    """The artifacts of each version, by its folder."""
    found: dict[str, list[Artifact]] = defaultdict(list)
    for entry in contents.below(folder):
        version = entry.name.removeprefix(folder + "/").partition("/")[0]
        artifact = contents.artifact_of.get(entry.name)
        if artifact is not None and VERSION_NAME.fullmatch(version):
            found[f"{folder}/{version}"].append(artifact)
    return found


def _published(contents: Contents, index: Index, versions: Iterable[str]) -> list[str]:
    """Versions with an index, newest first; none that the pointer does not name yet."""
    current = number_of(index.current.version)
    made = [
        v for v in versions if _index_of(v) in contents.sizes and number_of(basename(v)) <= current
    ]
    return sorted(made, key=lambda v: (-number_of(basename(v)), contents.age(_index_of(v))))


def _index_of(version: str) -> str:
    return f"{version}/index/{MANIFEST}"


def _why(contents: Contents, version: str, order: Sequence[str], policy: Policy) -> str | None:
    """Why a version may go; None if it is too young."""
    if version in order[1:]:
        since = contents.age(_index_of(order[order.index(version) - 1]))
        return f"superseded {age(since)} ago" if since >= policy.corpus_days * DAY else None
    last = min(entry.age_seconds for entry in contents.below(version))
    return f"of no version for {age(last)}" if last >= policy.attempt_days * DAY else None
