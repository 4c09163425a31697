"""Detects a hang of the run, reports the rank that causes it, and ends the process.

Ranks wait for each other, so all hang when one does. The cause is the rank that does not wait. A
thread of each rank watches for progress (batches, steps). After too long without any, every rank
writes the stacks of its threads to a file and reports its position. The rank that raised the alarm
collects the positions, and the message that all ranks log names the rank that is behind. Ranks
exchange these messages without waiting, while training itself hangs."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

from trainyard import json_text
from trainyard.errors import HangError, InfrastructureError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState
from trainyard.training.watch.rank_mailbox import RankMailbox

Found = TypeVar("Found")

log = logging.getLogger(__name__)

FACTOR = 30.0
LEAST_SECONDS = 600.0
"""Default timeout: FACTOR median steps, but at least LEAST_SECONDS."""
BETWEEN_STEPS_SECONDS = 3600.0
"""Default minimum after a step, when a checkpoint may be written without progress."""
FIRST_STEPS = 3
"""No default timeout before this many steps, because of compilation."""
POLL_SECONDS = 1.0
POLLS_PER_SECOND = 1000
"""Most looks for an alarm that the ranks together take at the store; more ranks look less often."""
GRACE_SECONDS = 5.0
"""Time for the ranks to report their positions."""

HANG, POSITIONS, REPORT = "hang", "positions", "report"
"""Messages: the rank that raised the alarm, a line with the position of each rank, the report."""

WAITING = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "collectives.py",
    "p2p.py",
    "mappings.py",
    "data/data_parallel.py",
    "data/param_gather.py",
    "watch/hang.py",
)
"""Files whose frames wait for other ranks."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of a rank in the code."""

    rank: int
    step: int
    """Finished steps."""
    frame: str
    """Innermost frame in trainyard's code, or else the innermost frame."""
    waits: bool
    """Whether it waits for another rank."""
    stacks: str = ""
    """File with the stacks of its threads."""


def position_of(rank: int, step: int, frame: FrameType | None, stacks: str = "") -> RankPosition:
    """The position of a thread, from its stack."""
    files: list[tuple[str, int, str]] = []
    while frame is not None:
        files.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    if not files:
        return RankPosition(rank, step, "nowhere", False, stacks)
    ours = [f for f in files if "/trainyard/" in f[0] or "/stages/" in f[0]]
    waits = any(name.endswith(WAITING) for name, _, _ in files[:12])
    name, line, function = (ours or files)[0]
    short = name.rpartition("/trainyard/")[2].rpartition("/site-packages/")[2]
    return RankPosition(rank, step, f"{function} ({short}:{line})", waits, stacks)


def summary(positions: Sequence[RankPosition], world_size: int, seconds: float) -> str:
    """The message that names the ranks that are behind."""
    silent = sorted(set(range(world_size)) - {position.rank for position in positions})
    fewest = min((position.step for position in positions), default=0)
    behind = [position for position in positions if position.step == fewest]
    busy = [position for position in behind if not position.waits] or behind
    parts = [f"no rank has made progress for {seconds:.0f} s (--hang-timeout-minutes)"]
    if silent:
        parts.append(f"rank {_list(silent)} does not answer: look at it first")
    if len(busy) < world_size:
        named = [f"rank {p.rank} is behind, after step {p.step} in {p.frame}" for p in busy[:4]]
        parts.append("; ".join(named))
    else:
        named = [f"rank {p.rank} after step {p.step} in {p.frame}" for p in positions[:4]]
        parts.append("all wait: " + "; ".join(named))
    files = [position.stacks for position in positions if position.stacks]
    if files:
        parts.append(f"stacks of all threads: {', '.join(files[:4])}")
    return "; ".join(parts)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8]))


def end_process(error: InfrastructureError) -> None:
    """Log the error and exit at once: destructors would wait for ranks that hang."""
    log.error("%s", error)
    sys.stderr.flush()
    os._exit(error.exit_status)


class HangWatch(Callback):
    """Runs before all other callbacks, so that it sees a step before it is saved."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        mailbox: RankMailbox,
        folder: Path,
        timeout_minutes: float | None = None,
        *,
        end: Callable[[InfrastructureError], None] = end_process,
        poll_seconds: float = POLL_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """folder: for the stacks. end: ends the process."""
        self._rank = rank
        self._world_size = world_size
        self._mailbox = mailbox
        self._folder = folder
        self._timeout = None if timeout_minutes is None else 60.0 * timeout_minutes
        self._end = end
        self._poll = max(poll_seconds, world_size / POLLS_PER_SECOND)
        self._grace = grace_seconds
        self._step = 0
        self._last = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=64)
        self._is_between = False
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._alarmed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="hang listener", daemon=True)

    # --- progress -----------------------------------------------------------------------------

    def beat(self) -> None:
        """Record progress."""
        self._is_between = False
        self._last = time.monotonic()

    def begin(self, state: TrainState) -> None:
        """Start the threads."""
        self._step = state.step
        self._main = threading.get_ident()
        self.beat()
        if self._timeout != 0:
            self._thread.start()
            self._listener.start()

    def after_step(self, event: StepEvent) -> None:
        """Record a step. A save may follow, which reports no progress until it is over."""
        if event.timing is not None:
            self._seconds.append(event.timing.ms / 1000.0)
        self._step = event.record.step
        self.beat()
        self._is_between = True

    def end(self) -> None:
        """Stop the threads."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._listener.is_alive():
            # A thread that is still inside torch's store when Python ends aborts the process.
            self._listener.join(self._grace)

    def failed(self) -> None:
        """Stop the threads."""
        self.end()

    def limit_seconds(self) -> float | None:
        """The timeout; None: none yet."""
        if self._timeout is not None:
            return self._timeout or None
        if len(self._seconds) < FIRST_STEPS:
            return None
        least = BETWEEN_STEPS_SECONDS if self._is_between else LEAST_SECONDS
        return max(least, FACTOR * statistics.median(self._seconds))

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(self._poll):
            limit = self.limit_seconds()
            silent = time.monotonic() - self._last
            alarmed = self._alarmed.is_set()
            if alarmed or (limit is not None and silent > limit):
                self._alarm(silent)
                return

    def _listen(self) -> None:
        """Wait for the alarm of another rank. In a thread of its own, as reading blocks if the rank
        with the store hangs."""
        while not self._over.wait(self._poll):
            try:
                if self._mailbox.read(HANG) is not None:
                    self._alarmed.set()
                    return
            except Exception as error:  # the store is gone, so the run is ending
                log.debug("hang watch: %r", error)

    def _alarm(self, silent: float) -> None:
        """Report the position of this rank, and end the process."""
        own = self._own_position()
        found: list[str] = []

        def exchange() -> None:
            try:
                found.append(self._exchange(own, silent))
                if self._rank == 0:  # the store ends with this process: let others read the report
                    time.sleep(2 * self._pause)
            except Exception as error:  # the store is gone
                log.debug("hang watch: %r", error)

        thread = threading.Thread(target=exchange, name="hang exchange", daemon=True)
        thread.start()
        thread.join(3 * self._grace + 3 * self._poll)
        if found:
            text = found[0]
        else:
            text = (
                f"{summary([own], 1, silent)}; rank 0, which keeps the messages of ranks, does not "
                "answer: look at it first"
            )
        if not self._over.is_set():
            self._end(HangError(text))

    def _exchange(self, own: RankPosition, silent: float) -> str:
        """Report the position of this rank; returns the report about all ranks."""
        self._mailbox.append(POSITIONS, json.dumps(asdict(own)) + "\n")
        collector = self._mailbox.claim(HANG, str(self._rank))
        if collector == str(self._rank):
            text = summary(self._collect(), self._world_size, silent)
            self._mailbox.put(REPORT, text)
            return text
        report = self._wait_for(lambda: self._mailbox.read(REPORT), 2 * self._grace)
        if report is not None:
            return report
        return (
            f"{summary([own], 1, silent)}; rank {collector}, which collects the positions of "
            "ranks, does not answer"
        )

    def _collect(self) -> list[RankPosition]:
        """The positions of all ranks that answer within the grace period: others look for an alarm
        once in `poll`."""

        def complete() -> bool | None:
            text = self._mailbox.read(POSITIONS) or ""
            return True if text.count("\n") >= self._world_size else None

        self._wait_for(complete, self._grace)
        lines = (self._mailbox.read(POSITIONS) or "").splitlines()
        positions = [RankPosition(**json_text.loads(line)) for line in lines]
        return sorted(positions, key=lambda position: position.rank)

    def _wait_for(self, look: Callable[[], Found | None], seconds: float) -> Found | None:
        """What `look` returns, as soon as it is not None; None after `seconds` and two polls."""
        deadline = time.monotonic() + seconds + 2 * self._poll
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(self._pause)
        return found

    @property
    def _pause(self) -> float:
        """Seconds between two looks at the store during an alarm."""
        return min(0.1 + self._poll / 10, self._poll)

    def _own_position(self) -> RankPosition:
        stacks = self._folder / f"stacks-rank{self._rank:04d}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with stacks.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            log.warning("cannot write stacks path=%s: %s", stacks, error)
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        frame = sys._current_frames().get(self._main)
        return position_of(self._rank, self._step, frame, str(stacks))
