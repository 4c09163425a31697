"""Telling a failed communication between ranks from a defect: torch raises RuntimeError for both.

Calls that expect to fail say so themselves (`reported` in data.py, `communicating` in pipeline);
collectives inside compiled or custom operators cannot, and are recognised here by their words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainyard.errors import CommunicationError, InfrastructureError

WORDS = re.compile(
    r"gloo/|\bgloo\b.*(timed out|closed|connect)|connection (closed|reset|refused)|"
    r"\bnccl\b.*(error|abort|timeout|timed out)|ncclsystemerror|ncclremoteerror|"
    r"ncclunhandledcudaerror|watchdog.*(timeout|timed out|collective)|"
    r"(recv|send|read|write)\w* .*(broken pipe|reset by peer)|broken pipe|"
    r"application timeout caused pair closure|processgroup\w* .*(abort|timeout|timed out|shut)|"
    r"(socket|store|wait) timeout|tcpstore|timed out waiting \d+\s*ms|work.*timed out",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's stores say when a rank or the network is gone."""

_KINDS = tuple(
    kind
    for name in ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
    if isinstance(kind := getattr(dist, name, None), type)
)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error means that ranks could not talk to each other."""
    if isinstance(error, _KINDS):
        return True
    return isinstance(error, RuntimeError) and WORDS.search(str(error)) is not None


@contextmanager
def communication_reported(rank: int, world_size: int) -> Iterator[None]:
    """Errors of communication, wherever in torch they come up, as CommunicationError that names
    this rank."""
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
