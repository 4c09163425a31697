"""Finds superseded versions of a corpus, and tokens that no version needs.

`flows.recipes.refresh` and `flows.recipes.collection` have the layout: NAME/current.json points to
NAME/versions/VERSION, made from NAME/parts/OPTIONS/DIGEST. A version stays with its parts while
anything made from it is in use."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from flows.gc.contents import Contents
from flows.gc.policy import DAY, Policy, age
from flows.gc.references import Collectable, Use, uses_of_virtual
from flows.gc.versions import VERSION_FILE, Old, Pointer, number_of, unit_of
from flows.recipes.corpus_versions import CURRENT, CorpusVersion, read_pointer
from trainyard.artifacts import store
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)

VERSION, PART = "corpus version", "corpus part"
"""Kinds of garbage."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus in one recipe's root."""

    name: str
    """Folder, relative to the yard's root."""
    current: CorpusVersion
    pointer: Pointer


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
                found.append(Corpus(folder, read[0], Pointer(folder, pointer, recipe=folder)))
    return found


def old_of_corpus(contents: Contents, corpus: Corpus, policy: Policy) -> list[Old]:
    """Its superseded versions, and the tokens of all sources."""
    return [*_old_versions(contents, corpus, policy), *_old_parts(contents, corpus, policy)]


def uses_of_versions(contents: Contents, corpus: Corpus, theirs: Iterable[str]) -> Iterable[Use]:
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
    current = number_of(corpus.current.version)
    there = [v for v in ages if at[v] in contents.sizes and number_of(v) <= current]
    order = sorted(there, key=number_of, reverse=True)
    newest = {corpus.current.version, *order[: policy.keep_corpus_versions]}
    for version, seconds in ages.items():
        place = f"{folder}/{version}"
        if version in newest or contents.has_work_in(place):
            continue
        if version in there:
            since = contents.age(at[order[order.index(version) - 1]])
            if since >= policy.corpus_days * DAY:
                why = f"superseded {age(since)} ago"
                yield Old(VERSION, _unit(contents, place), why, corpus.pointer)
        elif seconds >= policy.attempt_days * DAY:
            why = f"begun {age(seconds)} ago and never published"
            yield Old(VERSION, _unit(contents, place), why, corpus.pointer)


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
            why = "tokens of a source that is in no version"
            yield Old(PART, unit_of(contents, artifact), why, corpus.pointer)
