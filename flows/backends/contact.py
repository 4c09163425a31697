"""Whether a backend answers: from the requests of its client to the log of a flow.

A client repeats a request for minutes before it gives up, and one request may hang for a minute.
The flow says meanwhile that it waits (flows/runner/submission.py)."""

from __future__ import annotations

import time
from contextvars import ContextVar


class Contact:
    """The contact with one backend. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.reason = ""
        """Why the last request had no answer; empty if it just has none yet."""

    def ask(self) -> None:
        """A request begins."""
        if self._since is None:
            self._since = time.monotonic()

    def fail(self, reason: str) -> None:
        """A request had no answer."""
        self.ask()
        self.reason = reason

    def answer(self) -> None:
        """The backend answered, whatever it said."""
        self._since, self.reason = None, ""

    @property
    def silent_seconds(self) -> float:
        """Since the first request that has no answer; 0 if none waits for one."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


_current: ContextVar[Contact] = ContextVar("contact")


def current() -> Contact:
    """The contact that the running submission observes; outside of one, a contact of its own."""
    return _current.get(None) or Contact()


def observe() -> Contact:
    """A new contact, for all clients that this task and its children create."""
    contact = Contact()
    _current.set(contact)
    return contact
