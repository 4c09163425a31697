"""Work for a few threads, of which a bounded part is under way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trainyard.checkpoint.safetensors.shard import ShardFile

J = TypeVar("J")
R = TypeVar("R")

LOCAL_THREADS = max(1, min(4, os.cpu_count() or 1))
"""More do not make a disk faster, and copies from the page cache are bound by memory."""

REMOTE_THREADS = 8
"""Requests to an object store that are under way at once."""


def in_order(work: Callable[[J], R], jobs: Iterable[J], num_threads: int) -> Iterator[R]:
    """`work` of every job, by threads, in order; twice as many jobs as threads are begun.

    What one of them raises is raised when its turn comes, after those under way have ended."""
    pending: deque[Future[R]] = deque()
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint")
    try:
        for job in jobs:
            pending.append(executor.submit(work, job))
            if len(pending) >= 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def num_threads(files: Iterable[ShardFile]) -> int:
    """As many as reading them gains by."""
    return LOCAL_THREADS if all(file.is_local for file in files) else REMOTE_THREADS
