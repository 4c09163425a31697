"""Decides what is in use: everything from which a kept manifest was made, directly or indirectly.

A manifest names its inputs by URL and by digest, and a match of either counts. Another machine may
have another path to the same place; then the digest matches, or the path below the root."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.gc.contents import Artifact, Contents
from flows.runner.run_lock import JOBS, LOCK_FILE
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_listed_json
from trainyard.artifacts.output import PARTS
from trainyard.artifacts.parts_list import read_parts
from trainyard.artifacts.urls import basename, canonical_each, is_hidden, join, parent
from trainyard.errors import ArtifactError

COPIED = {("faiss_add", "index"), ("retro_db", "base"), ("retro_embed", "base")}
"""Inputs, by stage and name, that the output does not need any more: the database and the index
that it grew from, which it holds itself."""

STEP_CONFIG = "config.json"
"""File in a step of an unfinished training with its inputs, by digest."""


@dataclass(frozen=True, slots=True)
class Collectable:
    """A unit that is removed or kept as a whole: a corpus version, the tokens of one source."""

    place: str
    """Folder, or prefix, relative to the root."""
    names: tuple[str, ...]
    """Its files, relative to the root."""
    artifacts: tuple[Artifact, ...]
    extra_urls: tuple[str, ...] = ()
    """More URLs to which it refers, besides the inputs of its manifests."""

    @property
    def digests(self) -> frozenset[str]:
        """The output digests of its artifacts."""
        return frozenset(a.manifest.output_digest for a in self.artifacts if a.manifest is not None)


@dataclass(frozen=True, slots=True)
class Use:
    """URLs and digests that something in use refers to."""

    by: str
    """The user, for messages."""
    urls: tuple[str, ...]
    digests: frozenset[str] = frozenset()


def in_use(units: Sequence[Collectable], uses: Iterable[Use], root: str) -> dict[str, str]:
    """The units to which the uses refer, directly or through other units (place: user)."""
    kept: dict[str, str] = {}
    found_by = _Finder(units, root)
    pending = list(uses)
    while pending:
        use = pending.pop()
        for unit in found_by.use(use):
            if unit.place not in kept:
                kept[unit.place] = use.by
                pending.extend(uses_of(unit.artifacts))
                pending.append(Use(unit.place, unit.extra_urls))
    return kept


class _Finder:
    """Finds the units to which a use refers, without a look at each unit: a corpus may have a
    hundred thousand parts, and each of its versions names them all."""

    def __init__(self, units: Sequence[Collectable], root: str) -> None:
        self._units = units
        self._by_digest: dict[str, list[int]] = defaultdict(list)
        self._by_place: dict[str, list[int]] = defaultdict(list)
        self._by_home: dict[str, list[int]] = defaultdict(list)
        self._by_folder: dict[str, list[int]] = defaultdict(list)
        """By the folder that a unit is in, which may be used as a whole: a virtual dataset."""
        homes = canonical_each(join(root, unit.place) for unit in units)
        for number, (unit, at_home) in enumerate(zip(units, homes, strict=True)):
            for digest in unit.digests:
                self._by_digest[digest].append(number)
            self._by_place[unit.place].append(number)
            self._by_home[at_home].append(number)
            self._by_folder[parent(unit.place)].append(number)
            self._by_folder[parent(at_home)].append(number)
        self._place_lengths = sorted(set(map(len, self._by_place)))
        self._home_lengths = sorted(set(map(len, self._by_home)))

    def use(self, use: Use) -> list[Collectable]:
        """The units to which a use refers, in their order."""
        found = {number for digest in use.digests for number in self._by_digest.get(digest, ())}
        for url, whole in zip(use.urls, canonical_each(use.urls), strict=True):
            for head in _heads(whole, self._home_lengths):
                found.update(self._by_home.get(head, ()))
            found.update(self._by_folder.get(whole, ()))
            # The place may be part of another path: another machine has another one to the root.
            tail = url.rstrip("/")
            while True:
                for head in _heads(tail, self._place_lengths):
                    found.update(self._by_place.get(head, ()))
                found.update(self._by_folder.get(tail, ()))
                _, slash, tail = tail.partition("/")
                if not slash:
                    break
        return [self._units[number] for number in sorted(found)]


def _heads(url: str, lengths: Sequence[int]) -> Iterator[str]:
    """The beginnings of a URL, of the given lengths, that may name the unit that it is in."""
    for length in lengths:
        if length == len(url) or (length < len(url) and url[length] in "/._"):
            yield url[:length]


def uses_of(artifacts: Iterable[Artifact]) -> list[Use]:
    """The references of manifests."""
    found = []
    for artifact in artifacts:
        manifest = artifact.manifest
        if manifest is not None and manifest.inputs:
            named = manifest.inputs.items()
            records = [record for name, record in named if (manifest.stage, name) not in COPIED]
            urls = tuple(url for record in records for url in record.urls)
            found.append(Use(artifact.base, urls, frozenset(record.digest for record in records)))
    return found


def uses_of_virtual(contents: Contents, names: Iterable[str]) -> list[Use]:
    """The pairs that the virtual datasets among these files consist of, whether or not a manifest
    lists them. Raises ArtifactError for a damaged list: it may name anything."""
    lists = (name for name in names if name.endswith(PARTS) and not is_hidden(name))
    return [
        Use(name, tuple(part.prefix for part in read_parts(contents.url(name)).parts))
        for name in lists
    ]


def uses_of_steps(contents: Contents, artifacts: Iterable[Artifact]) -> list[Use]:
    """The references of the steps of unfinished trainings, whose manifests list no inputs."""
    found = []
    for artifact in artifacts:
        config = artifact.base + STEP_CONFIG
        manifest = artifact.manifest
        if manifest is not None and not manifest.inputs and config in artifact.files:
            document = read_listed_json(contents.url(config), manifest.record(STEP_CONFIG))
            inputs = document.get("inputs") if isinstance(document, dict) else None
            if isinstance(inputs, dict):
                found.append(Use(artifact.base, (), frozenset(map(str, inputs.values()))))
    return found


def uses_of_runs(run_folders: Iterable[Path]) -> list[Use]:
    """The paths and URLs in the options of jobs that began and did not end."""
    found = []
    for folder in run_folders:
        try:
            document = tomllib.loads((folder / "config.toml").read_text())
            texts = tuple(_texts(document))
        except (OSError, ValueError, RecursionError):
            continue
        found.append(Use(f"run {folder}", texts))
    return found


def uses_of_flows(contents: Contents) -> list[Use]:
    """The paths and URLs in the options of stages that live flow runs will start: a stage may wait
    for its slot longer than an unused version is kept."""
    found = []
    for claim in contents.claims:
        folder = claim.entry.name.removesuffix(LOCK_FILE)
        is_locked = claim.is_live and basename(claim.entry.name) == LOCK_FILE
        if is_locked and folder + JOBS in contents.sizes:
            try:
                documents = store.read_json(contents.url(folder + JOBS))
            except ArtifactError:  # the run has ended
                continue
            by = f"the flow run at work on {contents.url(folder)}"
            found.append(Use(by, tuple(set(_texts(documents)))))
    return found


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
