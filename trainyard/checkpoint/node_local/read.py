"""Opens a step whose tensor files are in the folders of several nodes."""

from __future__ import annotations

from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.checkpoint.sight import Sight
from trainyard.checkpoint.stored_step import Verify


def open_scattered(url: str, sight: Sight | None, verify: Verify) -> Checkpoint:
    """The checkpoint of a step folder with all documents and the tensor files of this node. All
    ranks open it, and load from it together (`scattered_load`).

    sight: None if every rank sees all files."""
    checkpoint = open_checkpoint(url, "--save", verify)
    checkpoint.files.sight = sight
    return checkpoint
