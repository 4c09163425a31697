"""One sweep over a yard: look, decide, and, unless it is a dry run, remove."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.gc.contents import Contents, look
from flows.gc.corpora import superseded
from flows.gc.leftovers import (
    abandoned_outputs,
    open_uploads,
    stale_claims,
    temporary_files,
    unfinished_work,
)
from flows.gc.machine import old_runs, old_scratch, run_folders, unended
from flows.gc.policy import Garbage, Policy
from flows.gc.references import uses_of_runs
from trainyard.errors import TrainyardError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What can go."""

    root: str
    garbage: tuple[Garbage, ...]
    kept: dict[str, str]
    """What is old and stays, since something in use was made of it: place to user."""

    @property
    def size_bytes(self) -> int:
        """Of all that can go."""
        return sum(one.size_bytes for one in self.garbage)


@dataclass(frozen=True, slots=True)
class Swept:
    """What became of it."""

    plan: Plan
    removed: tuple[Garbage, ...]
    failed: tuple[tuple[Garbage, TrainyardError | OSError], ...] = ()

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format_version": 1,
            "root": self.plan.root,
            "garbage": [one.to_document() for one in self.plan.garbage],
            "kept": self.plan.kept,
            "size_bytes": self.plan.size_bytes,
            "removed": len(self.removed),
            "failed": [{**one.to_document(), "error": str(e)} for one, e in self.failed],
        }


def plan(root: str, run_places: Iterable[Path], policy: Policy) -> Plan:
    """Look at a yard; nothing is changed.

    root: folder or URL of everything that is made. run_places: folders of this machine below which
    run folders lie."""
    contents = look(root, policy)
    runs = sorted({folder for place in run_places for folder in run_folders(place)})
    corpora, kept = superseded(contents, policy, uses_of_runs(unended(runs, policy)))
    found = [
        *corpora,
        *stale_claims(contents),
        *unfinished_work(contents, policy),
        *abandoned_outputs(contents, policy),
        *temporary_files(contents, policy),
        *open_uploads(contents, policy),
        *old_runs(runs, policy),
        *old_scratch(),
    ]
    return Plan(root, tuple(_once(contents, found)), kept)


def _once(contents: Contents, found: Sequence[Garbage]) -> list[Garbage]:
    """Without what lies in a version of a corpus that goes as a whole."""
    wholes = tuple(one.url.rstrip("/") + "/" for one in found if one.kind == "corpus version")
    return [one for one in found if not wholes or not one.url.startswith(wholes)]


def sweep(root: str, run_places: Iterable[Path], policy: Policy, dry_run: bool = False) -> Swept:
    """Look, and remove what can go. What cannot be removed is told, and does not stop the rest."""
    todo = plan(root, run_places, policy)
    if dry_run:
        return Swept(todo, ())
    removed, failed = [], []
    for one in todo.garbage:
        try:
            one.remove()
        except (TrainyardError, OSError) as error:
            log.warning("%s %s: not removed: %s", one.kind, one.url, error)
            failed.append((one, error))
        else:
            log.info("removed %s %s, %d bytes: %s", one.kind, one.url, one.size_bytes, one.why)
            removed.append(one)
    return Swept(todo, tuple(removed), tuple(failed))
