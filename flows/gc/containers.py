"""Finds and removes containers of stages that ended without a flow.

A flow removes each container whose end it saw. The others belong to a flow that was killed and not
started again. Before a container is removed, the rest of its log and its exit status are saved in
its run folder, if this machine has that folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from flows.backends.container.client import (
    NOT_STARTED,
    RECORD,
    ContainerClient,
    ContainerState,
    OwnContainer,
    record_container,
    recorded_end,
)
from flows.backends.container.log import ContainerLog
from flows.backends.run_folder import LOG, read_record
from flows.gc.policy import DAY, HOUR, Garbage, Policy, age
from trainyard.errors import ClaimHeldError, InfrastructureError

LOG_SECONDS = 60.0
"""Most time for saving the rest of a log."""


def left_containers(engine: str | None, policy: Policy) -> Iterator[Garbage]:
    """Our containers that ended, or were created and never started, longer ago than the policy
    allows.

    Raises InfrastructureError or ConfigError for an engine that cannot be reached or used."""
    with closing(ContainerClient(engine)) as client:
        found = sorted(client.own(), key=lambda one: one.name)
    for one in found:
        seconds = time.time() - max(one.made, one.state.ended)
        if _is_left(one.state) and seconds >= _kept_seconds(one.state, policy):
            event = "ended" if one.state.has_ended else "was created and not started"
            yield Garbage(
                kind="container",
                url=one.name,
                size_bytes=one.size_bytes,
                why=f"{event} {age(seconds)} ago, and no flow followed it",
                remove=partial(_remove, engine, one),
            )


def _is_left(look: ContainerState) -> bool:
    return look.has_ended or look.state == NOT_STARTED


def _kept_seconds(look: ContainerState, policy: Policy) -> float:
    """At least an hour for a container that was created and may be about to start."""
    return max(policy.attempt_days * DAY, 0.0 if look.has_ended else HOUR)


def _remove(engine: str | None, one: OwnContainer) -> None:
    with closing(ContainerClient(engine)) as client:
        look = client.look(one.name)
        if look is None:
            return
        if look.id != one.state.id or not _is_left(look):
            raise ClaimHeldError(f"container {one.name}: a flow follows it again")
        if look.has_ended and one.folder and Path(one.folder).is_dir():
            _save_end(client, Path(one.folder), one.name, look)
        client.remove(look.id)


def _save_end(client: ContainerClient, folder: Path, name: str, look: ContainerState) -> None:
    if recorded_end(read_record(folder / RECORD, name)) is not None:
        return
    listener = ContainerLog(client, name, folder / LOG, _ignore_line)
    listener.start()
    listener.join(LOG_SECONDS)
    if listener.is_alive() or listener.trouble:
        why = listener.trouble or f"it takes longer than {LOG_SECONDS:.0f} s"
        raise InfrastructureError(f"container {name}: its log cannot be saved ({why})")
    record_container(folder, name, look)


def _ignore_line(_line: str) -> None:
    """The listener writes new lines to the file; no one else needs them."""
