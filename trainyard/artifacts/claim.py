"""Claims: at most one run writes an output.

A claim is a small document created exclusively beside the manifest. Its holder renews it every few
seconds; a waiter takes over, conditionally, one that has stood still for `STALE_SECONDS` of the
waiter's own clock, or at once when it was made on this machine by a process that is gone. Clocks
are never compared."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass

from trainyard.artifacts import conditional, retry, store
from trainyard.artifacts.process import machine_mark, started
from trainyard.errors import ClaimHeldError, TrainyardError

log = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
AWAY_SECONDS = 10.0
"""A store that takes longer to say who holds a claim was away meanwhile."""

TELL_SECONDS = 60.0
"""Between two words about a claim that cannot be renewed."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a claim; enough to tell on the same machine whether it is still alive."""

    run: str
    host: str
    machine: str
    """Boot and process namespace: the same value means that process ids can be compared."""
    pid: int
    pid_started: str
    since: str
    beat: int = 0

    @staticmethod
    def of_this_process() -> Holder:
        """This process, with a run id of its own."""
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        pid = os.getpid()
        return Holder(
            uuid.uuid4().hex, socket.gethostname(), machine_mark(), pid, started(pid), now
        )

    def is_gone(self) -> bool:
        """True only when the process certainly does not exist any more."""
        return self.machine == machine_mark() and started(self.pid) != self.pid_started

    def encode(self, beat: int) -> bytes:
        """The claim document."""
        return json.dumps({**asdict(self), "beat": beat}).encode()


class Claim:
    """A held claim, renewed by a thread until `release`."""

    def __init__(self, url: str, holder: Holder, version: str) -> None:
        self.url = url
        self.holder = holder
        self.lost = False
        self._version = version
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        beat = 0
        trouble = Trouble(self.url)
        while not self._stop.wait(BEAT_SECONDS):
            beat += 1
            try:
                with retry.no_retry():  # the next beat asks again
                    version = conditional.replace_if_match(
                        self.url, self.holder.encode(beat), self._version
                    )
            except TrainyardError as error:
                trouble.met(error)
                continue
            trouble.passed()
            if version is None and not self._stop.is_set():
                self.lost = True
                log.error("the claim %s was taken over by another run; stopping", self.url)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._version = version or self._version

    def release(self) -> None:
        """Stop renewing and remove the claim, unless another run has it by now.

        Never raises: it runs on the way out of errors, and a claim that stays is taken over."""
        self._stop.set()
        self._thread.join()
        try:
            with retry.no_retry():
                current = _read(self.url)
                if current is not None and current[0].run == self.holder.run:
                    store.delete(self.url)
        except TrainyardError as error:
            log.warning("could not remove the claim: %s", error)

    def check(self) -> None:
        """Raise InfrastructureError when another run has taken the output over."""
        if self.lost:
            raise ClaimHeldError(
                f"{self.url}: another run took this output over; nothing more is written"
            )


class Trouble:
    """Says at once, and then once a minute, that a claim cannot be renewed; and that it can again.

    A store that is away, or a disk that is full, ends whoever writes to it, in words. A claim ends
    nothing: what is computed meanwhile may still be saved when the store is back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._since: float | None = None
        self._told_at = 0.0

    def met(self, error: TrainyardError) -> None:
        """It was not renewed."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        for_long = f" for {now - self._since:.0f} s" if now > self._since else ""
        log.warning(
            "could not renew the claim%s, trying again every %.0f s; after %.0f s another run may "
            "take the output over: %s",
            for_long,
            BEAT_SECONDS,
            STALE_SECONDS,
            error,
        )

    def passed(self) -> None:
        """It was renewed, or is another's."""
        if self._since is not None:
            log.info("the claim %s can be renewed again", self._url)
            self._since = None


def _read(url: str) -> tuple[Holder, str] | None:
    found = conditional.read_version(url)
    if found is None:
        return None
    try:
        return Holder(**json.loads(found[0])), found[1]
    except (ValueError, TypeError, RecursionError):
        return Holder("unknown", "unknown", "", 0, "", "unknown"), found[1]


def acquire(url: str, wait_seconds: float) -> Claim:
    """Claim an output; waits for a living holder up to `wait_seconds`, takes over a stale one.

    Raises ClaimHeldError naming the holder."""
    holder = Holder.of_this_process()
    deadline = time.monotonic() + wait_seconds
    seen: tuple[str, float] | None = None
    while True:
        asked = time.monotonic()
        version = conditional.put_if_absent(url, holder.encode(0))
        if version is not None:
            return Claim(url, holder, version)
        current = _read(url)
        if current is None:
            continue
        other, other_version = current
        now = time.monotonic()
        # Where the store was away, the holder could not renew it either.
        was_away = now - asked > AWAY_SECONDS
        if seen is None or seen[0] != other_version or was_away:
            if seen is None and not other.is_gone():
                log.info("waiting for %s, held by %s", url, _name(other))
            seen = (other_version, now)
        if other.is_gone() or now - seen[1] >= STALE_SECONDS:
            version = conditional.replace_if_match(url, holder.encode(0), other_version)
            if version is not None:
                log.info("took over a claim whose run is gone: %s", _name(other))
                return Claim(url, holder, version)
            continue
        if now >= deadline:
            raise ClaimHeldError(
                f"{url}: another run is writing this output: {_name(other)}. Wait for it, or stop "
                f"it; a dead one is taken over after {STALE_SECONDS:.0f} s (--claim-wait-seconds)"
            )
        time.sleep(min(1.0, max(0.05, deadline - now)))


def _name(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}, since {holder.since}"
