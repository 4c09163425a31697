"""Decides which old versions of corpora and indices go: those that nothing in use needs."""

from __future__ import annotations

from collections.abc import Sequence

from flows.gc import corpora, indices
from flows.gc.contents import Contents
from flows.gc.policy import Garbage, Policy
from flows.gc.references import Use, in_use, uses_of, uses_of_steps, uses_of_virtual


def superseded(
    contents: Contents, policy: Policy, running: Sequence[Use]
) -> tuple[list[Garbage], dict[str, str]]:
    """Garbage, and the old versions that are in use (place: user).

    running: what flow runs and their jobs read now or later."""
    every, grown = corpora.corpora(contents), indices.indices(contents)
    old = [
        *(one for corpus in every for one in corpora.old_of_corpus(contents, corpus, policy)),
        *(one for index in grown for one in indices.old_of_index(contents, index, policy)),
    ]
    theirs = {name for one in old for name in one.unit.names}
    others = [a for a in contents.artifacts if a.manifest_name not in theirs]
    uses = [*uses_of(others), *uses_of_steps(contents, others), *running]
    uses += uses_of_virtual(contents, (e.name for e in contents.entries if e.name not in theirs))
    uses += [use for one in every for use in corpora.uses_of_versions(contents, one, theirs)]
    uses += [index.use() for index in grown]
    kept = in_use([one.unit for one in old], uses, contents.root)
    going = [one.garbage(contents) for one in old if one.unit.place not in kept]
    parts = {one.unit.place for one in old if one.kind == corpora.PART}
    return going, {place: by for place, by in kept.items() if place not in parts}
