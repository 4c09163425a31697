"""Finds the start point of a run: initial weights, or the checkpoint of another run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from stages.certify.folder import CertifiedRun
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

GAP = "the checkpoint that the run resumed from is not available; give its path with --load"


def start_point(folder: CertifiedRun, first: PublishedStep, load: str | None) -> RunStart:
    """The start point of a run. first: its first checkpoint. load: URL of the other run's
    checkpoint, unless it is the one in the manifest."""
    digest = folder.made_of["inputs"].get(LOAD)
    if digest is None:
        return RunStart()
    if folder.options.get("finetune"):
        return RunStart(description="weights of another run (--finetune)")
    guess = start_before(first, GAP)
    record = None if folder.manifest is None else folder.manifest.inputs.get(LOAD)
    url = load or (record.urls[0] if record is not None and record.urls else None)
    if url is None:
        return guess
    for state in _states(url, guess.position.step):
        found = str(state.get("ledger_digest", ""))
        # The same checkpoint, by its digest, or one whose ledger the first lines continue.
        is_continued = chain(first.lines, found) == first.state.get("ledger_digest")
        if _is_same(url, digest) or is_continued:
            position = Position(**{name: int(state[name]) for name in asdict(Position())})
            description = f"step {position.step} of another run"
            scaler = state.get("loss_scaler", {})
            if not folder.options.get("load_optim", True):  # it starts over, and the rates with it
                position.scheduled_samples = position.num_updates = 0
                description, scaler = f"{description}, without its optimizer", {}
            return RunStart(position, found, scaler, description)
    return guess


def _states(url: str, step: int) -> Iterator[dict[str, Any]]:
    """state.json of that step: the URL is the step, or a run that has it."""
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
