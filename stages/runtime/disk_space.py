"""Refuses an output that its disk has no room for, before any work."""

from __future__ import annotations

import logging
import shutil

from stages.runtime.context import StageRun
from trainyard.artifacts.urls import local_path, show_url
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)


def check_disk(stage: StageRun, needed: int, what: str, remedy: str) -> None:
    """Raise ConfigError if so many bytes do not fit beside the output; nothing is known of stores.

    what: takes them, such as "40 embeddings". remedy: what makes it less."""
    assert stage.output is not None
    folder = local_path(stage.output.folder_url)
    if folder is None:
        return
    folder = folder.absolute()
    existing = next(one for one in (folder, *folder.parents) if one.is_dir())
    disk = shutil.disk_usage(existing)
    if not disk.total:  # a file system that does not say
        return
    free = disk.free
    log.info("disk needed_gb=%.2f free_gb=%.2f", needed / 1e9, free / 1e9)
    if needed > free:
        raise ConfigError(
            f"{show_url(stage.output.url)}: {what} take {needed / 1e9:,.1f} GB of disk, and "
            f"{free / 1e9:,.1f} GB are free there; {remedy}"
        )
