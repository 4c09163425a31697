"""A run in which nothing happens any more: whose fault it is, and its end.

Ranks wait for each other, so when one hangs all do, and the one to look at is the one that does
something else than wait. A thread of each rank looks for signs of life (batches taken, steps done).
When there were none for too long it has every rank write the stacks of all its threads to a file,
says which rank is behind and where, and ends the process."""

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
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from trainyard.errors import HangError, InfrastructureError
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.state import TrainState

PREFIX = "trainyard/watch"
TIMEOUT = timedelta(seconds=10)


class RankMailbox(Protocol):
    """Notes by name."""

    def put(self, name: str, text: str) -> None:
        """Leave a note."""

    def read(self, name: str) -> str | None:
        """The note of that name; None where there is none."""


class LocalMailbox:
    """Of one process, and its threads."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, name: str, text: str) -> None:
        """Leave a note."""
        with self._lock:
            self._notes[name] = text

    def read(self, name: str) -> str | None:
        """The note of that name."""
        with self._lock:
            return self._notes.get(name)


class StoreMailbox:
    """In the store in which ranks met, through a connection of its own: the one that training uses
    is locked while it waits for something."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """Leave a note."""
        self._store.set(name, text)

    def read(self, name: str) -> str | None:
        """The note of that name."""
        return self._store.get(name).decode() if self._store.check([name]) else None


def open_mailbox(world_size: int) -> RankMailbox:
    """The mailbox of the ranks that this process is one of; ranks that a program joined by other
    means than MASTER_ADDR are watched each by itself."""
    if world_size == 1 or "MASTER_ADDR" not in os.environ:
        return LocalMailbox()
    import torch.distributed

    dist: Any = torch.distributed  # its stubs hide the stores
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=TIMEOUT,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return StoreMailbox(dist.PrefixStore(f"{PREFIX}/{attempt}", store))


log = logging.getLogger(__name__)

FACTOR = 30.0
LEAST_SECONDS = 600.0
"""Without --hang-timeout-minutes a run hangs after so many median steps, but not before so long."""
BETWEEN_STEPS_SECONDS = 3600.0
"""Or this, while checkpoints are written, which may take their time without a sign of life."""
FIRST_STEPS = 3
"""Without --hang-timeout-minutes nothing is a hang before so many steps: compilation takes what it
takes."""
POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""For the ranks to say where they are."""

WAITING = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "collectives.py",
    "p2p.py",
    "mappings.py",
    "parallel/data.py",
    "parallel/gather.py",
    "training/hang.py",
)
"""Files in whose frames a rank waits for others."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is."""

    rank: int
    step: int
    """Steps it has finished."""
    frame: str
    """Its innermost frame in our own code, or the innermost of all."""
    waits: bool
    """It waits for another rank."""
    stacks: str = ""
    """File with the stacks of all its threads."""


def position_of(rank: int, step: int, frame: FrameType | None, stacks: str = "") -> RankPosition:
    """From the stack of a thread."""
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
    """Which ranks are behind, in words."""
    silent = sorted(set(range(world_size)) - {position.rank for position in positions})
    fewest = min((position.step for position in positions), default=0)
    behind = [position for position in positions if position.step == fewest]
    busy = [position for position in behind if not position.waits] or behind
    parts = [f"no rank has made progress for {seconds:.0f} s (--hang-timeout-minutes)"]
    if silent:
        parts.append(f"rank {_list(silent)} does not answer and is the first to look at")
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
    """Say it and end now: destructors would wait for ranks that do not come."""
    log.error("%s", error)
    sys.stderr.flush()
    os._exit(error.exit_status)


class HangWatch(Callback):
    """Stands before all other callbacks, so that it hears of a step before anybody saves it."""

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
        self._poll = poll_seconds
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

    # --- signs of life ------------------------------------------------------------------------

    def beat(self) -> None:
        """Something went on."""
        self._is_between = False
        self._last = time.monotonic()

    def begin(self, state: TrainState) -> None:
        """Start to watch."""
        self._step = state.step
        self._main = threading.get_ident()
        self.beat()
        if self._timeout != 0:
            self._thread.start()
            self._listener.start()

    def after_step(self, event: StepEvent) -> None:
        """A step is done; it may be saved next, which beats not until it is over."""
        if event.timing is not None:
            self._seconds.append(event.timing.ms / 1000.0)
        self._step = event.record.step
        self.beat()
        self._is_between = True

    def end(self) -> None:
        """Stop to watch."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._listener.is_alive():
            # A thread that is still inside torch's store when Python ends aborts the process.
            self._listener.join(self._grace)

    def failed(self) -> None:
        """Stop to watch."""
        self.end()

    def limit_seconds(self) -> float | None:
        """How long may be nothing; None: for ever, as yet."""
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
                self._alarm(silent, is_first=not alarmed)
                return

    def _listen(self) -> None:
        """Hear of what another rank has noticed. A thread of its own: where the rank that keeps the
        notes stands still, reading them does too."""
        while not self._over.wait(self._poll):
            try:
                if self._mailbox.read("hang") is not None:
                    self._alarmed.set()
                    return
            except Exception as error:  # the store is gone, and with it the run
                log.debug("hang watch: %r", error)

    def _alarm(self, silent: float, is_first: bool) -> None:
        """Tell where this rank is, and end it."""
        own = self._own_position()
        found: list[list[RankPosition]] = []

        def exchange() -> None:
            try:
                found.append(self._exchange(own, is_first))
            except Exception as error:  # nobody keeps the notes any more
                log.debug("hang watch: %r", error)

        thread = threading.Thread(target=exchange, name="hang exchange", daemon=True)
        thread.start()
        thread.join(2 * self._grace + 2 * self._poll)
        if found:
            text = summary(found[0], self._world_size, silent)
        else:
            text = (
                f"{summary([own], 1, silent)}; rank 0, which keeps the ranks' notes, does not "
                "answer and is the first to look at"
            )
        if not self._over.is_set():
            self._end(HangError(text))

    def _exchange(self, own: RankPosition, is_first: bool) -> list[RankPosition]:
        """The positions of all ranks that answer within the grace."""
        self._mailbox.put(f"position-{self._rank}", json.dumps(asdict(own)))
        if is_first:
            self._mailbox.put("hang", str(self._rank))
        deadline = time.monotonic() + self._grace + (0.0 if is_first else 2 * self._poll)
        while time.monotonic() < deadline and len(self._positions()) < self._world_size:
            time.sleep(min(0.1, self._poll))
        return self._positions()

    def _positions(self) -> list[RankPosition]:
        notes = (self._mailbox.read(f"position-{rank}") for rank in range(self._world_size))
        return [RankPosition(**json.loads(note)) for note in notes if note is not None]

    def _own_position(self) -> RankPosition:
        stacks = self._folder / f"stacks-rank{self._rank:04d}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with stacks.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            log.warning("no stacks in %s: %s", stacks, error)
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        frame = sys._current_frames().get(self._main)
        return position_of(self._rank, self._step, frame, str(stacks))
