"""Finds superseded versions of a corpus, and tokens that no version needs.

`flows.recipes.refresh` and `flows.recipes.collection` have the layout: NAME/current.json points to
NAME/versions/VERSION, made from NAME/parts/OPTIONS/DIGEST. A version stays with its parts while
anything made from it is in use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from flows.gc.contents import Contents, holding, remove_files
from flows.gc.policy import DAY, Garbage, Policy, age
from flows.gc.references import Collectable, Use, in_use, uses_of, uses_of_steps, uses_of_virtual
from flows.recipes.corpus_versions import CURRENT, CorpusVersion, read_pointer
from flows.runner.run_lock import LOCK_FILE
from trainyard.artifacts import store
from trainyard.artifacts.claim import acquire
from trainyard.artifacts.manifest import read_slot, retire
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileInfo
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError, ClaimHeldError

log = logging.getLogger(__name__)

VERSION_FILE = "version.json"
BY = "gc"
"""Name of this program in the mark of a manifest that it removes."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus in one recipe's root."""

    name: str
    """Folder, relative to the yard's root."""
    current: CorpusVersion
    pointer: FileInfo
    """Of the file that names the current version."""


@dataclass(frozen=True, slots=True)
class Old:
    """A unit to remove if nothing uses it."""

    unit: Collectable
    why: str
    corpus: Corpus


def corpora(contents: Contents) -> list[Corpus]:
    """Every pointer to a corpus version in the yard."""
    found = []
    for entry in contents.entries:
        folder, _, name = entry.name.rpartition("/")
        if name == CURRENT and contents.below(f"{folder}/versions"):
            try:
                pointer = store.info(contents.url(entry.name))
                read = read_pointer(contents.url(entry.name))
                for document in _documents(contents, folder):
                    read_pointer(contents.url(document))
            except ArtifactError as error:
                log.warning("%s; its corpus is left alone", error)
                continue
            if read is not None:
                found.append(Corpus(folder, read[0], pointer))
    return found


def superseded(
    contents: Contents, policy: Policy, running: Sequence[Use]
) -> tuple[list[Garbage], dict[str, str]]:
    """Garbage, and the old versions that are in use (place: user).

    running: what flow runs and their jobs read now or later."""
    old: list[Old] = []
    for corpus in corpora(contents):
        old += _old_versions(contents, corpus, policy)
        old += _old_parts(contents, corpus, policy)
    theirs = {name for one in old for name in one.unit.names}
    others = [a for a in contents.artifacts if a.manifest_name not in theirs]
    uses = [*uses_of(others), *uses_of_steps(contents, others), *running]
    uses += uses_of_virtual(contents, (e.name for e in contents.entries if e.name not in theirs))
    uses += [use for corpus in corpora(contents) for use in _of_versions(contents, corpus, theirs)]
    kept = in_use([one.unit for one in old], uses, contents.root)
    going = [one for one in old if one.unit.place not in kept]
    versions = {place: by for place, by in kept.items() if "/versions/" in place}
    return [_garbage(contents, one) for one in going], versions


def _of_versions(contents: Contents, corpus: Corpus, theirs: Iterable[str]) -> Iterable[Use]:
    """The references in the documents of kept versions."""
    gone = set(theirs)
    yield Use(join(corpus.name, CURRENT), _urls(corpus.current))
    for name in _documents(contents, corpus.name):
        read = None if name in gone else read_pointer(contents.url(name))
        if read is not None:
            yield Use(name, _urls(read[0]))


def _documents(contents: Contents, name: str) -> list[str]:
    """The documents of a corpus' versions."""
    found = (entry.name for entry in contents.below(f"{name}/versions"))
    return [one for one in found if basename(one) == VERSION_FILE]


def _urls(version: CorpusVersion) -> tuple[str, ...]:
    parts = (source.part for source in version.sources)
    return (*version.tokens.values(), *version.documents, *parts)


# --- what is old --------------------------------------------------------------------------------


def _old_versions(contents: Contents, corpus: Corpus, policy: Policy) -> Iterable[Old]:
    folder = f"{corpus.name}/versions"
    ages: dict[str, float] = {}
    for entry in contents.below(folder):
        version = entry.name.removeprefix(folder + "/").partition("/")[0]
        ages[version] = min(entry.age_seconds, ages.get(version, entry.age_seconds))
    at = {version: f"{folder}/{version}/{VERSION_FILE}" for version in ages}
    current = _number(corpus.current.version)
    there = [v for v in ages if at[v] in contents.sizes and _number(v) <= current]
    order = sorted(there, key=_number, reverse=True)
    newest = {corpus.current.version, *order[: policy.keep_corpus_versions]}
    for version, seconds in ages.items():
        place = f"{folder}/{version}"
        if version in newest or contents.has_work_in(place):
            continue
        if version in there:
            since = contents.age(at[order[order.index(version) - 1]])
            if since >= policy.corpus_days * DAY:
                yield Old(_unit(contents, place), f"superseded {age(since)} ago", corpus)
        elif seconds >= policy.attempt_days * DAY:
            why = f"begun {age(seconds)} ago and never published"
            yield Old(_unit(contents, place), why, corpus)


def _number(version: str) -> int:
    head = version.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def _unit(contents: Contents, place: str) -> Collectable:
    names = tuple(entry.name for entry in contents.below(place))
    inside = [contents.artifact_of[name] for name in names if name in contents.artifact_of]
    parts = tuple(url for use in uses_of_virtual(contents, names) for url in use.urls)
    return Collectable(place, names, tuple(inside), parts)


def _old_parts(contents: Contents, corpus: Corpus, policy: Policy) -> Iterable[Old]:
    """The tokens of all sources, as candidates: those that a version needs are in use."""
    folder = f"{corpus.name}/parts/"
    for artifact in contents.artifacts:
        if not artifact.base.startswith(folder) or contents.is_at_work(artifact.base):
            continue
        if contents.age(artifact.manifest_name) >= policy.corpus_days * DAY:
            names = (*(n for n in artifact.files if n in contents.sizes), artifact.manifest_name)
            unit = Collectable(artifact.base, names, (artifact,))
            yield Old(unit, "tokens of a source that is in no version", corpus)


# --- removing -----------------------------------------------------------------------------------


def _garbage(contents: Contents, old: Old) -> Garbage:
    is_part = f"{old.corpus.name}/parts/" in old.unit.place
    return Garbage(
        kind="corpus part" if is_part else "corpus version",
        url=contents.url(old.unit.place),
        size_bytes=contents.size(old.unit.names),
        why=old.why,
        remove=partial(_remove_locked, contents, old.corpus, partial(_remove, contents, old.unit)),
    )


def _remove_locked(contents: Contents, corpus: Corpus, remove: Callable[[], None]) -> None:
    """Remove under the run lock of the corpus, since a flow may be about to reuse a part.

    Raises ClaimHeldError if a flow works on the corpus."""
    claim = acquire(join(contents.root, corpus.name, LOCK_FILE), 0)
    try:
        # Not read again: it names each source, and there may be as many removals.
        pointer = join(contents.root, corpus.name, CURRENT)
        if not store.exists(pointer) or store.info(pointer) != corpus.pointer:
            raise ClaimHeldError(f"{corpus.name}: it has a new version; the next sweep checks it")
        remove()
    finally:
        claim.release()


def _remove(contents: Contents, unit: Collectable) -> None:
    """Retire manifests first and remove them last, so that the next sweep finds what a kill leaves.
    The document of a version is removed last of all."""
    for artifact in unit.artifacts:
        url = contents.url(artifact.manifest_name)
        with holding(contents, artifact.base):
            slot = read_slot(url)
            if slot is not None:
                retire(url, slot, BY)
            remove_files(contents, artifact.files)
    last = (MANIFEST, f"/{VERSION_FILE}")
    remove_files(contents, [name for name in unit.names if not name.endswith(last)])
    remove_files(contents, [name for name in unit.names if name.endswith(MANIFEST)])
    for name in unit.names:
        if name.endswith(VERSION_FILE):
            store.delete(contents.url(name))
