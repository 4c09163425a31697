"""One sweep of a yard: list, decide, and on request remove."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.gc.contents import Contents, look
from flows.gc.corpora import VERSION
from flows.gc.leftovers import (
    abandoned_outputs,
    open_uploads,
    stale_claims,
    temporary_files,
    unfinished_work,
)
from flows.gc.machine import old_runs, old_scratch, runs
from flows.gc.policy import Garbage, Policy
from flows.gc.references import uses_of_flows, uses_of_runs
from flows.gc.superseded import superseded
from trainyard.artifacts.leftovers import uploads
from trainyard.artifacts.urls import local_path
from trainyard.errors import ClaimHeldError, ConfigError, TrainyardError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be removed."""

    root: str
    garbage: tuple[Garbage, ...]
    kept: dict[str, str]
    """Old units that stay because they are in use (place: user)."""
    unseen: tuple[str, ...] = ()
    """Why the containers of an engine could not be listed; empty if all were."""

    @property
    def size_bytes(self) -> int:
        """Bytes that can be removed."""
        return sum(one.size_bytes for one in self.garbage)


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep."""

    plan: Plan
    removed: tuple[Garbage, ...]
    left: tuple[tuple[Garbage, ClaimHeldError], ...] = ()
    """Garbage that a run works on; the next sweep checks it again."""
    failed: tuple[tuple[Garbage, TrainyardError | OSError], ...] = ()

    def to_document(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format_version": 1,
            "root": self.plan.root,
            "garbage": [one.to_document() for one in self.plan.garbage],
            "kept": self.plan.kept,
            "unseen": list(self.plan.unseen),
            "size_bytes": self.plan.size_bytes,
            "removed": len(self.removed),
            "left": [{**one.to_document(), "why_left": str(e)} for one, e in self.left],
            "failed": [{**one.to_document(), "error": str(e)} for one, e in self.failed],
        }


def plan(
    root: str,
    homes: Iterable[Path],
    policy: Policy,
    is_named: bool = False,
    engines: Sequence[str | None] = (),
) -> Plan:
    """Decide what to remove; changes nothing.

    root: folder or URL of all output. homes: folders of this machine with run folders as
    JOB/ATTEMPT. is_named: a person named the root, so ConfigError if it does not exist; the root of
    a profile may not exist yet. engines: Docker engines of the stages, None for the default one."""
    contents = look(root, policy)
    if is_named:
        _refuse_missing(contents)
    found_runs = runs(homes)
    running = [run.folder for run in found_runs if run.may_run(policy)]
    uses = [*uses_of_runs(running), *uses_of_flows(contents)]
    versions, kept = superseded(contents, policy, uses)
    found = [
        *versions,
        *stale_claims(contents),
        *unfinished_work(contents, policy),
        *abandoned_outputs(contents, policy),
        *temporary_files(contents, policy),
        *open_uploads(contents, policy),
        *old_runs(found_runs, policy),
        *old_scratch(),
    ]
    left, unseen = _containers_on(engines, policy)
    return Plan(root, (*_once(contents, found), *left), kept, unseen)


def _containers_on(
    engines: Sequence[str | None], policy: Policy
) -> tuple[list[Garbage], tuple[str, ...]]:
    """Containers to remove, and the errors of engines that did not answer."""
    found: list[Garbage] = []
    unseen = []
    for engine in engines:
        from flows.gc.containers import left_containers  # imports the Docker SDK

        try:
            found += left_containers(engine, policy)
        except TrainyardError as error:
            unseen.append(str(error))
    return found, tuple(unseen)


def _refuse_missing(contents: Contents) -> None:
    path = local_path(contents.root)
    is_there = bool(contents.entries or uploads(contents.root)) if path is None else path.is_dir()
    if not is_there:
        what = "there is no such folder" if path is not None else "nothing is there"
        raise ConfigError(f"{contents.root}: {what}; name the root of all output")


def _once(contents: Contents, found: Sequence[Garbage]) -> list[Garbage]:
    """The garbage without the contents of corpus versions, which are removed as a whole."""
    wholes = tuple(one.url.rstrip("/") + "/" for one in found if one.kind == VERSION)
    return [one for one in found if not wholes or not one.url.startswith(wholes)]


def sweep(
    root: str,
    homes: Iterable[Path],
    policy: Policy,
    remove: bool = False,
    is_named: bool = False,
    engines: Sequence[str | None] = (),
) -> Swept:
    """Decide what can be removed, and remove it only with `remove`. A failed removal does not stop
    the others. Items that a run uses by now are left for the next sweep."""
    todo = plan(root, homes, policy, is_named, engines)
    if not remove:
        return Swept(todo, ())
    removed, left, failed = [], [], []
    for one in todo.garbage:
        try:
            one.remove()
        except ClaimHeldError as error:
            log.info("%s %s: left for the next sweep: %s", one.kind, one.url, error)
            left.append((one, error))
        except (TrainyardError, OSError) as error:
            log.warning("%s %s: not removed: %s", one.kind, one.url, error)
            failed.append((one, error))
        else:
            log.info("removed %s %s, %d bytes: %s", one.kind, one.url, one.size_bytes, one.why)
            removed.append(one)
    return Swept(todo, tuple(removed), tuple(left), tuple(failed))
