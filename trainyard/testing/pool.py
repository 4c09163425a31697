"""A pool of rank processes: a test calls a function on 1 to 8 of them.

The processes are forked once, from a server that imports torch and the trainer, when they are first
needed. Each call creates and destroys a default process group, which takes milliseconds. Imports
and module state of a rank stay until the pool is closed; torch's generators are seeded again for
each call. After a failure, the ranks of the call are replaced.

In tests, by the fixture `ranks` (tests/conftest.py):

    @pytest.mark.distributed
    def test_it(ranks: RankPool) -> None:
        ranks.run(check, 4, "an argument")  # check("an argument") on four ranks

where `check` is a function at the top of a module. Elsewhere: `with RankPool() as ranks`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from trainyard.testing.distributed import (
    PRELOADED,
    TIMEOUT_SECONDS,
    Failure,
    Target,
    find_function,
    first_cause,
    pickled_error,
    target_of,
)

MAX_RANKS = 8

GRACE_SECONDS = 2.0
"""Time after the first failure for other ranks to report theirs."""

STACKS_SECONDS = 2.0
"""Time for a rank to dump its stack."""

NAME = "trainyard rank"
"""Process name, followed by a number."""


class RankPool:
    """Up to `max_ranks` processes that serve one call after another."""

    def __init__(self, max_ranks: int = MAX_RANKS, preloaded: Sequence[str] = PRELOADED) -> None:
        """preloaded: modules to import once for all ranks; only the first pool of a process
        decides."""
        self.max_ranks, self.preloaded = max_ranks, (*preloaded,)
        self._ranks: list[_Rank] = []
        self._num_calls = 0
        self._store: Any = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._store = None

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> list[Any]:
        """Call `fn(*args)` on ranks 0 to world_size - 1 over gloo. Returns the result of each.

        Raises the first error, with its traceback as a note; TimeoutError, with the stack of each
        rank as notes, if they do not finish in time."""
        assert 1 <= world_size <= self.max_ranks, (world_size, self.max_ranks)
        try:
            return self._run(fn, world_size, args, timeout_seconds)
        except NotJoinedError:  # once in some thousand calls, with gloo
            return self._run(fn, world_size, args, timeout_seconds)

    def _run(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_seconds: float
    ) -> list[Any]:
        ranks = self._started(world_size)
        self._num_calls += 1
        call = (target_of(fn), args, world_size, self._num_calls, timeout_seconds)
        data = pickle.dumps(call)
        for rank in ranks:
            rank.connection.send_bytes(data)
        replies: dict[int, Any] = {}
        try:
            failures = self._collect(ranks, replies, timeout_seconds)
            if failures:
                raise first_cause(failures)
        except BaseException:  # also an interrupt: the next call must not meet half of this one
            self._replace(ranks)
            raise
        return [replies[number] for number in range(world_size)]

    # --- processes --------------------------------------------------------------------------

    def _started(self, count: int) -> list[_Rank]:
        if self._store is None:
            self._store = _serve_store()
        for number in range(count):
            if number == len(self._ranks):
                self._ranks.append(self._rank(number))
            elif not self._ranks[number].process.is_alive():
                self._ranks[number] = self._rank(number)
        return self._ranks[:count]

    def _replace(self, ranks: Sequence[_Rank]) -> None:
        for rank in ranks:
            rank.kill()
            self._ranks[rank.number] = self._rank(rank.number)

    def _rank(self, number: int) -> _Rank:
        return _Rank(number, self._store.port, self.preloaded)

    # --- replies ----------------------------------------------------------------------------

    def _collect(
        self, ranks: Sequence[_Rank], replies: dict[int, Any], timeout_seconds: float
    ) -> list[Failure]:
        """Fill `replies`; returns the failures that ranks reported in time."""
        waiting = {rank.connection: rank for rank in ranks}
        deadline, failures = time.monotonic() + timeout_seconds, []
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                failure = rank.receive(replies)
                if failure is not None:
                    failures.append(failure)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and not failures:
            raise _out_of_time(list(waiting.values()), timeout_seconds)
        return failures


class NotJoinedError(RuntimeError):
    """A rank could not join the others; nothing was called on it."""


def _out_of_time(running: Sequence[_Rank], timeout_seconds: float) -> TimeoutError:
    """The error with the ranks that have not finished, and the stacks of each as notes."""
    numbers = sorted(rank.number for rank in running)
    error = TimeoutError(f"ranks {numbers} still ran after {timeout_seconds:.0f} s")
    for rank in running:
        error.add_note(f"rank {rank.number}, {rank.stacks()}")
    return error


class _Rank:
    """One process, and the pipe to it."""

    def __init__(self, number: int, port: int, preloaded: Sequence[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*preloaded])
        self.number = number
        self.connection, theirs = context.Pipe()
        self._stacks, stacks = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_serve,
            args=(number, port, theirs, stacks),
            name=f"{NAME} {number}",
            daemon=True,
        )
        self.process.start()
        theirs.close()
        stacks.close()

    def receive(self, replies: dict[int, Any]) -> Failure | None:
        """Put the reply of the rank into `replies`, or return its failure; exiting is one too."""
        try:
            is_well, data = self.connection.recv()
        except EOFError:
            self.process.join(GRACE_SECONDS)
            return Failure(self.number, time.monotonic(), None, "", self.process.exitcode)
        if is_well:
            replies[self.number] = pickle.loads(data)
            return None
        return Failure(self.number, *pickle.loads(data))

    def stacks(self) -> str:
        """The stacks of its threads; the process continues."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        text = b""
        while self._stacks.poll(STACKS_SECONDS if not text else 0.1):
            more = os.read(self._stacks.fileno(), 1 << 16)  # text, no messages
            if not more:
                break
            text += more
        return text.decode(errors="replace") or "which did not dump its stacks"

    def kill(self) -> None:
        """End the process now."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self._stacks.close()


def _serve_store() -> Any:
    """The store in which the ranks of every call meet, served by this process."""
    import torch.distributed

    dist: Any = torch.distributed  # its stubs hide the stores
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# --- in a rank --------------------------------------------------------------------------------


def _serve(number: int, port: int, connection: Connection, stacks: Connection) -> None:
    import torch
    import torch.distributed

    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    torch.set_num_threads(1)
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with suppress(EOFError, KeyboardInterrupt):  # the test session is over
        while True:
            target, args, world_size, call, timeout_seconds = pickle.loads(connection.recv_bytes())
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world_size))
            torch.manual_seed(0)
            try:
                _join(dist, dist.PrefixStore(f"call-{call}", store), world_size, timeout_seconds)
                result = pickle.dumps(_call(target, args))
                dist.destroy_process_group()
            except BaseException as error:
                connection.send((False, pickled_error(error)))
                return  # remains of its groups would disturb the next call
            connection.send((True, result))


def _join(dist: Any, store: Any, world_size: int, timeout_seconds: float) -> None:
    from trainyard.parallel.gloo import one_worker_per_group

    one_worker_per_group()
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except RuntimeError as error:
        raise NotJoinedError(str(error)) from error


def _call(target: Target, args: tuple[Any, ...]) -> Any:
    return find_function(*target)(*args)
