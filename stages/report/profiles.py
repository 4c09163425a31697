"""Profiles beside a run (--profile, --record-memory-history) and the links of a run card to them.

A link is relative, so that it works wherever the folders of the card and of the run are shown."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from trainyard.artifacts import store
from trainyard.artifacts.urls import basename, join, relative

LOGS = "logs"
KINDS = (
    ("profile-", "steps, for ui.perfetto.dev"),
    ("memory-history-", "memory, for pytorch.org/memory_viz"),
)
"""How the names of profiles in LOGS of a run folder begin, and what they are."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One file."""

    what: str
    """What is in it, and what opens it."""
    url: str
    link: str
    """From the folder of the card; empty if the run is in another store, where no link leads."""

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return basename(self.url)


def profiles_of(run_url: str, card_folder_url: str) -> tuple[Profile, ...]:
    """The profiles in a run folder, by name."""
    folder = join(run_url, LOGS)
    path = relative(folder, card_folder_url)
    return tuple(
        Profile(what, join(folder, name), "" if path is None else quote(join(path, name)))
        for name in sorted(store.list_folder(folder))
        for beginning, what in KINDS
        if name.startswith(beginning)
    )
