"""Containers of stages that ended when no flow was there any more, and none came back for.

A flow removes each container whose end it has seen. What is left was followed by a program that was
killed and never started again. All that its flow could still want is kept in the run folder first,
where this machine has that: the last lines of the log, and how the container ended."""

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
"""So long the rest of a log may take to be written down."""


def left_containers(engine: str | None, policy: Policy) -> Iterator[Garbage]:
    """Our containers on an engine that ended, or were never started, as long ago as the policy
    says.

    Raises InfrastructureError or ConfigError for an engine that is away or closed to us."""
    with closing(ContainerClient(engine)) as client:
        found = sorted(client.own(), key=lambda one: one.name)
    for one in found:
        seconds = time.time() - max(one.made, one.state.ended)
        if _is_left(one.state) and seconds >= _kept_seconds(one.state, policy):
            happened = "ended" if one.state.has_ended else "was made and not started"
            yield Garbage(
                kind="container",
                url=one.name,
                size_bytes=one.size_bytes,
                why=f"{happened} {age(seconds)} ago, and no flow came back for it",
                remove=partial(_remove, engine, one),
            )


def _is_left(look: ContainerState) -> bool:
    return look.has_ended or look.state == NOT_STARTED


def _kept_seconds(look: ContainerState, policy: Policy) -> float:
    """One that is made is about to be started, whatever the policy says."""
    return max(policy.attempt_days * DAY, 0.0 if look.has_ended else HOUR)


def _remove(engine: str | None, one: OwnContainer) -> None:
    with closing(ContainerClient(engine)) as client:
        look = client.look(one.name)
        if look is None:
            return
        if look.id != one.state.id or not _is_left(look):
            raise ClaimHeldError(f"container {one.name}: a flow came back for it")
        if look.has_ended and one.folder and Path(one.folder).is_dir():
            _keep_end(client, Path(one.folder), one.name, look)
        client.remove(look.id)


def _keep_end(client: ContainerClient, folder: Path, name: str, look: ContainerState) -> None:
    if recorded_end(read_record(folder / RECORD, name)) is not None:
        return
    listener = ContainerLog(client, name, folder / LOG, _unheard)
    listener.start()
    listener.join(LOG_SECONDS)
    if listener.is_alive() or listener.trouble:
        why = listener.trouble or f"it takes more than {LOG_SECONDS:.0f} s"
        raise InfrastructureError(f"container {name}: its log cannot be kept ({why})")
    record_container(folder, name, look)


def _unheard(_line: str) -> None:
    """Nobody listens: what is new goes to the file."""
