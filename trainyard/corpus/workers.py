"""Independent jobs over worker processes: no hang, no orphan, and the same fault told every time.

Knows nothing of what the jobs do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from trainyard.errors import InfrastructureError

J = TypeVar("J")
R = TypeVar("R")

IN_FLIGHT = 2
"""Jobs handed out for each worker: enough that none waits, few enough that stopping is quick."""


def run_jobs(
    function: Callable[[J], R], jobs: Sequence[J], num_workers: int, environment: Mapping[str, str]
) -> Iterator[tuple[J, R]]:
    """Yield every job with its result as it is done; with one worker, in this process and in order.

    A job that raises ends the rest. Of several such the first in order is raised, whatever the
    number of workers. `environment` is set in each worker before it begins; `function` must be
    importable."""
    if num_workers == 1 or len(jobs) < 2:
        for job in jobs:
            yield job, function(job)
        return
    others = multiprocessing.active_children()
    executor = ProcessPoolExecutor(
        min(num_workers, len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(dict(environment),),
    )
    try:
        yield from _drive(executor, function, jobs, IN_FLIGHT * num_workers)
    except BaseException:
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _drive(
    executor: ProcessPoolExecutor, function: Callable[[J], R], jobs: Sequence[J], in_flight: int
) -> Iterator[tuple[J, R]]:
    pending: dict[Future[R], int] = {}
    fault: tuple[int, BaseException] | None = None
    queue = iter(range(len(jobs)))
    while True:
        while fault is None and len(pending) < in_flight and (i := next(queue, None)) is not None:
            pending[executor.submit(function, jobs[i])] = i
        if fault is not None:  # only an earlier job could still change what is told
            pending = {future: i for future, i in pending.items() if i < fault[0]}
        if not pending:
            break
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            i = pending.pop(future)
            error = future.exception()
            if error is None:
                yield jobs[i], future.result()
            elif fault is None or i < fault[0]:
                fault = (i, error)
    if fault is not None:
        raise _in_words(fault[1])


def _in_words(error: BaseException) -> BaseException:
    if not isinstance(error, BrokenProcessPool):
        return error
    return InfrastructureError(
        "a worker process died, killed from outside or for want of memory; finished work is kept, "
        "so run the same command again, with a smaller --workers if memory is short"
    )


def _begin_worker(environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends us
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
