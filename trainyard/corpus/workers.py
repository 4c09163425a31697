"""Runs independent jobs on threads and processes: no hang, no orphan, the same error every time.

Threads of one process share what is costly to build. They suffice if the heavy part releases the
interpreter lock; other jobs need processes. Knows nothing of the jobs' content."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any, Protocol, TypeVar

from trainyard.artifacts import retry
from trainyard.errors import InfrastructureError, TrainyardError
from trainyard.machine import death_by_signal, memory_kills

J = TypeVar("J")
R = TypeVar("R")

Outcome = tuple[int, Any, BaseException | None]
"""Number of a job, its result, or its error."""

WORKER = "a worker process"
END_SECONDS = 10.0
"""How long a thread may take to stop."""


@dataclass(frozen=True, slots=True)
class Crew:
    """How many workers, and where: `processes` 0 means threads of this process only."""

    processes: int
    threads: int
    """In each process."""

    @staticmethod
    def of(workers: int, side_by_side: bool, waiting: int = 1) -> Crew:
        """A crew of `workers` that work at once.

        side_by_side: threads do not wait for each other. Two threads are then as fast as two
        processes; more are not, because of the work under the interpreter lock. waiting: this many
        times as many threads, for jobs that mostly wait for a network."""
        if workers == 1 or (side_by_side and workers == 2):
            return Crew(0, workers * waiting)
        processes, threads = (-(-workers // 2), 2) if side_by_side else (workers, 1)
        return Crew(processes, threads * waiting)


class Interrupted(BaseException):
    """Raised by `check_stop` in a job whose result is no longer needed."""


_thread = threading.local()


def check_stop() -> None:
    """Raise Interrupted if the run has ended already; for long jobs to call now and then."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Interrupted


def run_jobs(
    function: Callable[[J], R], jobs: Sequence[J], crew: Crew, environment: Mapping[str, str]
) -> Iterator[tuple[J, R]]:
    """Yield every job with its result as it is done.

    A job that raises ends the rest. Of several errors, the one of the first job is raised, for any
    crew. `environment` is set before any worker begins; for processes, `function` must be
    importable."""
    if not jobs:
        return
    pool: _Pool
    if crew.processes == 0 or len(jobs) == 1:
        os.environ.update(environment)
        pool = _Threads(function, min(crew.threads, len(jobs)))
    else:
        pool = _Processes(function, crew, min(crew.processes, len(jobs)), environment)
    with contextlib.closing(pool):
        yield from _drive(pool, jobs)


class _Pool(Protocol):
    def free(self) -> bool:
        """Whether a worker would take one more job."""

    def submit(self, number: int, job: Any) -> None:
        """Hand out a job."""

    def take(self) -> Outcome:
        """Wait for the next finished job."""

    def close(self) -> None:
        """End all workers."""


def _drive(pool: _Pool, jobs: Sequence[J]) -> Iterator[tuple[J, Any]]:
    pending: set[int] = set()
    fault: tuple[int, BaseException] | None = None
    submitted = 0
    while True:
        while fault is None and submitted < len(jobs) and pool.free():
            pool.submit(submitted, jobs[submitted])
            pending.add(submitted)
            submitted += 1
        if fault is not None:  # only an earlier job can still change the error
            pending = {number for number in pending if number < fault[0]}
        if not pending:
            break
        number, result, error = pool.take()
        pending.discard(number)
        if error is None:
            yield jobs[number], result
        elif fault is None or number < fault[0]:
            fault = (number, error)
    if fault is not None:
        raise fault[1]


# --- threads ----------------------------------------------------------------------------------


class _Threads:
    """Threads of this process. They are daemons, so one that hangs does not keep the process."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        count: int,
        report: Callable[[Outcome], object] | None = None,
    ) -> None:
        self._function = function
        self._jobs: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._report = report or self._done.put
        self._stop = threading.Event()
        self._room = count + 1  # one job waits in the queue, so that no thread waits
        self._threads = [
            threading.Thread(target=self._work, name=f"worker-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        _thread.stop = self._stop
        while (item := self._jobs.get()) is not None and not self._stop.is_set():
            number, job = item
            try:
                outcome: Outcome = (number, self._function(job), None)
            except Interrupted:
                return
            except BaseException as error:
                outcome = (number, None, error)
            self._report(outcome)

    def free(self) -> bool:
        return self._room > 0

    def submit(self, number: int, job: Any) -> None:
        self._room -= 1
        self._jobs.put((number, job))

    def take(self) -> Outcome:
        outcome = self._done.get()
        self._room += 1
        return outcome

    def close(self) -> None:
        self._stop.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(END_SECONDS)


# --- processes --------------------------------------------------------------------------------


class _Worker:
    """One process, and the numbers of the jobs that it has."""

    def __init__(self, process: Any, channel: connection.Connection) -> None:
        self.process = process
        self.channel = channel
        self.numbers: set[int] = set()


class _Processes:
    """Spawned processes, each with some threads; each gets its jobs through a separate pipe."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        crew: Crew,
        count: int,
        environment: Mapping[str, str],
    ) -> None:
        self._room = crew.threads + 1
        self._workers: list[_Worker] = []
        self._outcomes: list[Outcome] = []
        self._kills = memory_kills()
        context = get_context("spawn")
        # Ctrl-C goes to every process of the terminal, but this process ends the others. They
        # inherit the blocked signal, so it does not end one while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        patient = retry.state_for_child()
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(function, theirs, crew.threads, dict(environment), patient),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def free(self) -> bool:
        return any(len(worker.numbers) < self._room for worker in self._workers)

    def submit(self, number: int, job: Any) -> None:
        worker = min(self._workers, key=lambda w: len(w.numbers))
        worker.numbers.add(number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `take` reports its end
            worker.channel.send((number, job))

    def take(self) -> Outcome:
        while not self._outcomes:
            busy = {w.channel: w for w in self._workers if w.numbers}
            for ready in connection.wait(list(busy)):
                assert isinstance(ready, connection.Connection)
                self._receive(busy[ready])
        return self._outcomes.pop(0)

    def _receive(self, worker: _Worker) -> None:
        try:
            number, result, error = worker.channel.recv()
        except (EOFError, OSError):  # the kernel closes the pipe of a process that dies
            worker.process.join(END_SECONDS)
            fault = _death(worker.process.exitcode, self._kills)
            self._outcomes += [(number, None, fault) for number in sorted(worker.numbers)]
            worker.numbers.clear()
            return
        worker.numbers.discard(number)
        self._outcomes.append((number, result, error))

    def close(self) -> None:
        for worker in self._workers:
            if worker.numbers:
                worker.process.terminate()
            worker.channel.close()  # an idle worker ends when its pipe closes
        for worker in self._workers:
            worker.process.join(END_SECONDS)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()


def _death(code: int | None, kills: int) -> InfrastructureError:
    """The error for a worker process that died. kills: `memory_kills` before it was started."""
    if code is not None and code < 0:
        error = death_by_signal(WORKER, -code, kills, "take a smaller --workers")
    elif code:
        error = InfrastructureError(
            f"{WORKER} died with exit status {code}, perhaps while it started; its message is above"
        )
    else:
        error = InfrastructureError(f"{WORKER} died")
    return type(error)(f"{error}; finished work is kept, so run the same command again")


def _serve(
    function: Callable[[Any], Any],
    channel: connection.Connection,
    threads: int,
    environment: dict[str, str],
    patient: tuple[bool, frozenset[str]],
) -> None:
    """Run a worker process until the pipe to its parent closes."""
    os.environ.update(environment)
    retry.take_over(patient)
    sending = threading.Lock()

    def report(outcome: Outcome) -> None:
        number, result, error = outcome
        with sending:
            channel.send((number, result, None if error is None else _portable(error)))

    pool = _Threads(function, threads, report)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pool.submit(*channel.recv())
    os._exit(0)  # the parent has ended or needs nothing more; threads may still be working


def _portable(error: BaseException) -> BaseException:
    """An error that can be sent through the pipe: ours can, others may not."""
    if isinstance(error, TrainyardError | MemoryError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, str(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown"
    return RuntimeError(f"in a worker: {type(error).__name__}: {error} ({place})")
