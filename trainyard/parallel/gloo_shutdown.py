"""Waits for gloo's threads before a process ends.

gloo's threads in torch take the GIL when they release the tensors of a finished collective,
possibly late on a busy machine. During interpreter shutdown that aborts the process. If a group
outlives training, because a kept model refers to it, only this module waits for these threads."""

from __future__ import annotations

import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)

THREAD = "pt_gloo_runloop"
"""Name that torch gives them."""
LOOKS = 5
"""Looks in a row at which all must sleep: one that waits for the GIL sleeps, too, until this thread
releases it between two looks."""
PAUSE_SECONDS = 0.002
MOST_SECONDS = 10.0


def wait_for_gloo(most_seconds: float = MOST_SECONDS) -> None:
    """Until gloo's threads have nothing to do; after the last collective. Where there is no /proc
    nothing is known of them."""
    deadline = time.monotonic() + most_seconds
    quiet = 0
    while quiet < LOOKS:
        if time.monotonic() > deadline:
            log.warning("gloo's threads were still at work %.0f s after the last use", most_seconds)
            return
        time.sleep(PAUSE_SECONDS)
        states = _states()
        if not states:
            return
        quiet = quiet + 1 if all(state == "S" for state in states) else 0


def _states() -> list[str]:
    """States of gloo's threads, as in /proc: R running or about to, S asleep."""
    found = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if name == THREAD:
            found.append(rest.split()[0])
    return found
