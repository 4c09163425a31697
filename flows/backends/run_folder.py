"""The names of what lies in a run folder, whichever place its job runs in."""

from __future__ import annotations

LOG = "log.txt"
"""Everything that the job wrote to stdout and stderr."""

HEARTBEAT = "heartbeat"
"""File whose time a job may renew to say that it lives, besides its log."""


def log_name(share: int | None) -> str:
    """File with the output of the job, or of one of its shares."""
    return LOG if share is None else f"log-{share:05d}.txt"


def share_folder(share: int | None) -> str:
    """Folder, relative to the run folder, of a share's own reports; empty for a whole job."""
    return "" if share is None else f"share-{share}"
