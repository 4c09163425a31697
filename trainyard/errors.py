"""Errors for users, and their exit statuses.

0 means done or nothing to do. Any other exception is a defect of trainyard: 70."""

from __future__ import annotations

import errno
import signal as signals

EXIT_DEFECT = 70
"""Exit status of any other exception (EX_SOFTWARE of sysexits.h)."""


class TrainyardError(Exception):
    """Base of the errors whose message is meant for a person."""

    exit_status = EXIT_DEFECT


class DataError(TrainyardError):
    """Invalid data: the message names the file, and the line or offset. Exit status 1."""

    exit_status = 1


class ArtifactError(DataError):
    """A stored artifact is missing, incomplete or differs from its manifest. Exit status 1."""


class ConfigError(TrainyardError):
    """Invalid options: the message has option, value, rule, next step. Exit status 2."""

    exit_status = 2


class InfrastructureError(TrainyardError):
    """Store, network, memory or a collective failed; the same command may succeed later. Exit 3."""

    exit_status = 3


class RerunElsewhere(InfrastructureError):  # noqa: N818  # says what to do
    """A step gave an impossible result twice: rerun on other hardware to find the cause.

    Megatron-LM's exit status for it: 16."""

    exit_status = 16


class ValidationFailed(InfrastructureError):  # noqa: N818  # Megatron-LM's name
    """A step gave an impossible result whose cause is known. Exit status 17, as in
    Megatron-LM."""

    exit_status = 17


class ClaimHeldError(InfrastructureError):
    """Another run is writing the same output."""


class HostMemoryError(InfrastructureError):
    """The machine, or the job's share of it, is out of memory."""


class DeviceMemoryError(InfrastructureError):
    """A GPU is out of memory."""


class CommunicationError(InfrastructureError):
    """Ranks cannot find, or have lost, each other: NCCL, gloo, rendezvous."""


class HangError(InfrastructureError):
    """No rank has made progress within the timeout."""


class Stopped(BaseException):
    """SIGTERM or SIGINT asked the run to stop; nothing is wrong. Status 128 + signal.

    A BaseException, so that no `except Exception` on the way mistakes it for a failure."""

    def __init__(self, signum: int, by: str = "") -> None:
        super().__init__(f"stopped by {by or signals.Signals(signum).name}")
        self.signum = signum
        self.saved = ""
        """What the run kept, for people."""

    @property
    def exit_status(self) -> int:
        """143 for SIGTERM, 130 for SIGINT, as shells and schedulers expect."""
        return 128 + self.signum


class StoppedByOption(Stopped):
    """An option asked the run to stop here. Status 143."""

    def __init__(self, option: str) -> None:
        super().__init__(signals.SIGTERM, option)


OF_HOST = ("defaultcpuallocator", "can't allocate memory", "cannot allocate memory", "bad_alloc")
OF_DEVICE = ("cuda", "cublas", "cudnn", "hip error", "xpu", "gpu")
OF_EITHER = ("out of memory", "alloc_failed")


def lack_of_memory(
    error: BaseException,
) -> type[HostMemoryError] | type[DeviceMemoryError] | None:
    """Our class for a foreign out-of-memory error; None for any other error.

    Errors of Python and the system are recognised by class, torch's by class name, since torch need
    not be loaded. For host memory, torch and its libraries raise RuntimeError, which only the
    message tells from a defect."""
    if isinstance(error, MemoryError):
        return HostMemoryError
    if isinstance(error, OSError):
        return HostMemoryError if error.errno == errno.ENOMEM else None
    if type(error).__name__ == "OutOfMemoryError":
        return DeviceMemoryError
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    # NCCL also reports it if it may not lock memory for its network (`ulimit -l`).
    is_of_network = "nccl" in text or "ibv_" in text
    if not is_of_network and any(words in text for words in OF_HOST):
        return HostMemoryError
    if not any(words in text for words in OF_EITHER):
        return None
    return DeviceMemoryError if any(words in text for words in OF_DEVICE) else HostMemoryError
