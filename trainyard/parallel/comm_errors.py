"""Distinguishes failed communication between ranks from defects; torch raises RuntimeError for
both.

`communicating` wraps a call that only the network can break. `communication_errors` wraps a whole
run and recognises collectives inside compiled or custom operators by their messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainyard.errors import CommunicationError, InfrastructureError, lack_of_memory

MESSAGES = re.compile(
    r"gloo/|\bgloo\b.{0,500}(timed out|closed|connect)|connection (closed|reset|refused)|"
    r"\bnccl\b.{0,500}(error|abort|timeout|timed out)|ncclsystemerror|ncclremoteerror|"
    r"ncclunhandledcudaerror|watchdog.{0,500}(timeout|timed out|collective)|"
    r"(recv|send|read|write)\w{0,40} .{0,500}(broken pipe|reset by peer)|broken pipe|"
    r"application timeout caused pair closure|"
    r"processgroup\w{0,40} .{0,500}(abort|timeout|timed out|shut)|"
    r"(socket|store|wait) timeout|tcpstore|timed out waiting \d{1,20}\s?ms|work.{0,500}timed out",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's stores when a rank or the network is gone."""

_KINDS = tuple(
    kind
    for name in ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
    if isinstance(kind := getattr(dist, name, None), type)
)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error means that ranks could not talk to each other."""
    if isinstance(error, _KINDS):
        return True
    return isinstance(error, RuntimeError) and MESSAGES.search(str(error)) is not None


class communicating:  # noqa: N801  # reads as a phrase: `with communicating("receiving"):`
    """Raises CommunicationError for anything that fails inside, except a lack of memory."""

    def __init__(self, what: str = "communication between ranks") -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | ValueError) and lack_of_memory(error) is None:
            raise CommunicationError(f"{self._what} failed: {error}") from error


@contextmanager
def communication_errors(rank: int, world_size: int) -> Iterator[None]:
    """Raises CommunicationError, naming this rank, for a communication failure anywhere inside."""
    try:
        yield
    except InfrastructureError:
        raise
    except Exception as error:
        if world_size == 1 or not is_communication_error(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise CommunicationError(
            f"rank {rank} of {world_size} lost its connection to another rank, which has most "
            f"likely ended or hangs; look for the first message of the others: {first}"
        ) from error
