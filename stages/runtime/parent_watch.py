"""Stops a stage when the process that started it dies.

The starter keeps the write end of a pipe open and passes the read end by number in
TRAINYARD_LIFELINE_FD. The kernel closes the pipe when the starter dies, for any reason, and the
stage then stops itself."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time

from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

LIFELINE = "TRAINYARD_LIFELINE_FD"
GRACE_SECONDS = 20.0
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while it is stopped.

    For ranks: they write under their parent's claim, which another run takes over."""
    parent = os.getppid()
    if parent == 1:
        os._exit(128 + signal.SIGTERM)  # the parent died, and the system adopted this process
    die_with(parent)


def die_with(parent: int) -> None:
    """The same for a child that knows its parent, which in a container may be process 1."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)  # the parent died before the call


def stop_with_parent(grace_seconds: float = GRACE_SECONDS) -> None:
    """Watch the pipe, if the starter passed one; stop this process when it closes."""
    number = os.environ.pop(LIFELINE, "")
    if number.isdigit():
        try:
            os.set_inheritable(int(number), False)
        except OSError as error:
            raise ConfigError(f"{LIFELINE}={number} names no open pipe: {error}") from error
        threading.Thread(
            target=_watch, args=(int(number), grace_seconds), name="lifeline", daemon=True
        ).start()


def _watch(descriptor: int, grace_seconds: float) -> None:
    os.read(descriptor, 1)  # returns when the last write end is closed
    log.error("the process that started this run died; stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    os.kill(os.getpid(), signal.SIGKILL)
