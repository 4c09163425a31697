"""Claims: at most one run writes an output.

A claim is a small document created exclusively next to the manifest. Its holder renews it every few
seconds. A waiter takes it over, conditionally, when it did not change for `STALE_SECONDS` of the
waiter's clock, or at once if a dead process of this machine made it. Clocks are never compared."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

from trainyard.artifacts import conditional, retry, store
from trainyard.artifacts.process import machine_mark, started
from trainyard.errors import ClaimHeldError, TrainyardError

log = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
UNAVAILABLE_SECONDS = 10.0
"""If reading a claim takes longer, the store was unavailable in between."""

WARN_SECONDS = 60.0
"""Between two warnings about a claim that cannot be renewed."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a claim. On the same machine this shows whether the holder is alive."""

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
        """This process, with a new run id."""
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        pid = os.getpid()
        return Holder(
            uuid.uuid4().hex, socket.gethostname(), machine_mark(), pid, started(pid), now
        )

    def is_gone(self) -> bool:
        """True only if the process certainly no longer exists."""
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
        failures = RenewalLog(self.url)
        while not self._stop.wait(BEAT_SECONDS):
            beat += 1
            try:
                with retry.no_retry():  # the next renewal tries again
                    version = conditional.replace_if_match(
                        self.url, self.holder.encode(beat), self._version
                    )
            except TrainyardError as error:
                failures.failed(error)
                continue
            failures.succeeded()
            if version is None and not self._stop.is_set():
                self.lost = True
                log.error("another run took over the claim %s; stopping", self.url)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._version = version or self._version

    def release(self) -> None:
        """Stop renewing and remove the claim, unless another run holds it.

        Never raises: it runs while errors are handled, and a claim that stays is taken over."""
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
        """Raise ClaimHeldError if another run took the output over."""
        if self.lost:
            raise ClaimHeldError(f"{self.url}: another run took this output over; writing stops")


class RenewalLog:
    """Warns at once, and then once a minute, that a claim cannot be renewed.

    An unavailable store or a full disk fails the writer that meets it. A claim fails nothing: the
    run may still save its results when the store is back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._since: float | None = None
        self._warned_at = 0.0

    def failed(self, error: TrainyardError) -> None:
        """The claim was not renewed."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._warned_at < WARN_SECONDS:
            return
        self._warned_at = now
        for_long = f" for {now - self._since:.0f} s" if now > self._since else ""
        log.warning(
            "could not renew the claim%s, trying again every %.0f s; after %.0f s another run may "
            "take the output over: %s",
            for_long,
            BEAT_SECONDS,
            STALE_SECONDS,
            error,
        )

    def succeeded(self) -> None:
        """The claim was renewed, or another run holds it."""
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


def acquire(
    url: str, wait_seconds: float, on_wait: Callable[[str], object] = lambda holder: None
) -> Claim:
    """Claim an output. Waits for a live holder up to `wait_seconds`; takes over a stale claim.

    on_wait: called with the holder when waiting begins. Raises ClaimHeldError, which names the
    holder."""
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
        # While the store was unavailable, the holder could not renew it either.
        was_unavailable = now - asked > UNAVAILABLE_SECONDS
        if seen is None or seen[0] != other_version or was_unavailable:
            if seen is None and not other.is_gone():
                log.info("waiting for %s, held by %s", url, _name(other))
                on_wait(_name(other))
            seen = (other_version, now)
        if other.is_gone() or now - seen[1] >= STALE_SECONDS:
            version = conditional.replace_if_match(url, holder.encode(0), other_version)
            if version is not None:
                log.info("took over the claim of a dead run: %s", _name(other))
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
