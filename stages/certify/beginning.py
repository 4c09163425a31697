"""Where a run began: with nothing, or at the checkpoint of another run, if that is still there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from stages.certify.folder import RunFolder
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.urls import basename, join, parent
from trainyard.checkpoint.steps import STATE, locate_step, step_document, step_folder, step_of
from trainyard.errors import TrainyardError
from trainyard.training.loop.ledger import chain
from trainyard.training.run.run_record import (
    LOAD,
    Position,
    PublishedStep,
    RunStart,
    start_before,
)

GAP = "the checkpoint that the run went on from is not at hand; --load tells where it lies"


def beginning_of(folder: RunFolder, first: PublishedStep, load: str | None) -> RunStart:
    """Where a run began. first: its first checkpoint. load: where the other run's lies now, if not
    where the run tells."""
    digest = folder.made_of["inputs"].get(LOAD)
    if digest is None:
        return RunStart()
    if folder.options.get("finetune"):
        return RunStart(words="weights of another run (--finetune)")
    guess = start_before(first, GAP)
    url = load or _told(folder)
    if url is None:
        return guess
    for state in _states(url, guess.position.step):
        found = str(state.get("ledger_digest", ""))
        # What is still what it was, by its digest, must be continued; else the lines tell.
        if _is_same(url, digest) or _leads_to(found, first):
            position = Position(**{name: int(state[name]) for name in asdict(Position())})
            words = f"step {position.step} of another run"
            return RunStart(position, found, state.get("loss_scaler", {}), words)
    return guess


def _told(folder: RunFolder) -> str | None:
    record = None if folder.manifest is None else folder.manifest.inputs.get(LOAD)
    return record.urls[0] if record is not None and record.urls else None


def _states(url: str, step: int) -> Iterator[dict[str, Any]]:
    """state.json of that step, from where it can lie: a step itself, or a run that has it."""
    try:
        located, _ = locate_step(url, "--load")
    except TrainyardError:
        return
    root = parent(located) if step_of(basename(located)) is not None else located
    for place in dict.fromkeys((located, join(root, step_folder(step)))):
        try:
            state = step_document(place, STATE)
        except TrainyardError:
            continue
        if isinstance(state, dict) and state.get("step") == step:
            yield state


def _is_same(url: str, digest: str) -> bool:
    try:
        return resolve(LOAD, (url,)).digest == digest
    except TrainyardError:
        return False


def _leads_to(digest: str, first: PublishedStep) -> bool:
    """Whether the first lines of a run are chained to this ledger."""
    return chain(first.lines, digest) == first.state.get("ledger_digest")
