"""The errors a person can meet, and the exit status each of them ends a stage with.

0 is done or nothing to do. Everything that is not one of these classes is a defect of ours: 70."""

from __future__ import annotations

import errno
import signal as signals

EXIT_DEFECT = 70
"""Exit status of an error that is none of the classes below (EX_SOFTWARE of sysexits.h)."""


class TrainyardError(Exception):
    """Root of the errors whose message is meant for a person."""

    exit_status = EXIT_DEFECT


class DataError(TrainyardError):
    """A fault in the data: the message names file, and line or offset. Exit status 1."""

    exit_status = 1


class ArtifactError(DataError):
    """What storage holds is missing, torn or not what its manifest says. Exit status 1."""


class ConfigError(TrainyardError):
    """What a person wrote cannot be: option, value, rule, next step. Exit status 2."""

    exit_status = 2


class InfrastructureError(TrainyardError):
    """Store, network, memory or a collective failed; the same command may succeed later. Exit 3."""

    exit_status = 3


class RerunElsewhere(InfrastructureError):  # noqa: N818  # says what to do
    """A step gave an impossible result twice: the same command on other hardware tells why.

    Megatron-LM's exit status for it: 16."""

    exit_status = 16


class ValidationFailed(InfrastructureError):  # noqa: N818  # what it is called upstream
    """A step gave an impossible result, and what is to blame is known. Exit status 17, as
    Megatron-LM's."""

    exit_status = 17


class ClaimHeldError(InfrastructureError):
    """Another run is writing the same output."""


class HostMemoryError(InfrastructureError):
    """The machine, or the part of it that a job may use, has no more memory to give."""


class DeviceMemoryError(InfrastructureError):
    """A GPU has no more memory to give."""


class CommunicationError(InfrastructureError):
    """Ranks do not find each other, or have lost each other: NCCL, gloo, rendezvous."""


class HangError(InfrastructureError):
    """The ranks are there, and none has made progress for longer than it may take."""


class Stopped(BaseException):
    """SIGTERM or SIGINT asked the run to stop; nothing is wrong. Status 128 + signal.

    A BaseException, so that no `except Exception` on the way mistakes it for a failure."""

    def __init__(self, signum: int, by: str = "") -> None:
        super().__init__(f"stopped by {by or signals.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_status(self) -> int:
        """143 for SIGTERM, 130 for SIGINT, as shells and schedulers expect."""
        return 128 + self.signum


class StoppedByOption(Stopped):
    """The run was to stop here by what it was told beforehand. Status 143."""

    def __init__(self, option: str) -> None:
        super().__init__(signals.SIGTERM, option)


OF_HOST = ("defaultcpuallocator", "can't allocate memory", "cannot allocate memory", "bad_alloc")
OF_DEVICE = ("cuda", "cublas", "cudnn", "hip error", "xpu", "gpu")
OF_EITHER = ("out of memory", "alloc_failed")


def lack_of_memory(
    error: BaseException,
) -> type[HostMemoryError] | type[DeviceMemoryError] | None:
    """What a foreign error means that says that there is no more memory; None for any other.

    Python's and the system's errors are known by their class, torch's by its name, as torch need
    not be loaded. For memory of the host torch and the libraries under it raise RuntimeError,
    which their words alone tell from a defect."""
    if isinstance(error, MemoryError):
        return HostMemoryError
    if isinstance(error, OSError):
        return HostMemoryError if error.errno == errno.ENOMEM else None
    if type(error).__name__ == "OutOfMemoryError":
        return DeviceMemoryError
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    # NCCL says it of memory that it may not lock for its network: `ulimit -l`, and no lack of any.
    is_of_network = "nccl" in text or "ibv_" in text
    if not is_of_network and any(words in text for words in OF_HOST):
        return HostMemoryError
    if not any(words in text for words in OF_EITHER):
        return None
    return DeviceMemoryError if any(words in text for words in OF_DEVICE) else HostMemoryError
