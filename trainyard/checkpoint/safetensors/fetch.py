"""Planned reads of several files, carried out by a few threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.safetensors.ranges import Read
from trainyard.checkpoint.safetensors.shard import READ_BYTES
from trainyard.checkpoint.safetensors.threads import in_order, num_threads


def fetch_all(plans: Sequence[tuple[TensorFile, Sequence[Read[torch.Tensor]]]]) -> int:
    """Carry out reads that fill disjoint memory; how many bytes were read.

    Each thread has one buffer of a read's size, whatever is loaded."""
    reads = [(file, read) for file, of_file in plans for read in of_file]
    size = sum(read.end - read.begin for _, read in reads)
    if size <= READ_BYTES:
        for file, read in reads:
            file.fetch(read)
        return size
    own = threading.local()

    def fetch(job: tuple[TensorFile, Read[torch.Tensor]]) -> None:
        file, read = job
        if not hasattr(own, "scratch"):
            own.scratch = torch.empty(READ_BYTES, dtype=torch.uint8)
        file.fetch(read, own.scratch)

    for _ in in_order(fetch, reads, num_threads(file for file, _ in plans)):
        pass
    return size
