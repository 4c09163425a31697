"""Runs a function on several ranks over gloo or NCCL, for tests.

The ranks are forked from a server process that imports torch and the trainer once, so the first
call of a test session takes seconds and the others tenths of a second. The ranks end with the call;
those of pool.py serve many calls."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300.0
"""Long: eight ranks on two cores exchange only 300 messages a second, and a call of half a minute
may take four times as long on a busy machine."""
PRELOADED = ("torch", "torch.testing", "torch._dynamo", "pytest", "trainyard.training.trainer")
"""Modules that the fork server imports when it starts, which it does once for all its users: each
rank that had to import them itself would take two to three seconds."""

Target = tuple[str, str, str]
"""File, module and qualified name of a function."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank."""

    rank: int
    when: float
    """time.monotonic(), which all processes of a machine share."""
    error: BaseException | str | None
    """The exception, or its text if it cannot be pickled; None for a process that left none."""
    text: str = ""
    exit_code: int | None = None


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    backend: str = "gloo",
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Call `fn(*args)` on every rank, with a default process group. Returns the result of each.

    Raises the first error, with its traceback as a note; TimeoutError if the ranks do not finish in
    time. No process outlives the call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with tempfile.TemporaryDirectory(prefix="trainyard-ranks-") as folder:
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        ranks = [
            context.Process(
                target=_rank_main, args=(target_of(fn), folder, rank, world_size, backend)
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(folder), timeout_seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [
            pickle.loads((Path(folder) / f"{r}.result").read_bytes()) for r in range(world_size)
        ]


def _wait(ranks: Sequence[BaseProcess], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [process.exitcode for process in ranks]
        if any(codes):
            raise _cause(codes, folder)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {running} still ran after {timeout_seconds:.0f} s")
        time.sleep(0.01)


def _cause(codes: Sequence[int | None], folder: Path) -> BaseException:
    failures = []
    for rank, code in enumerate(codes):
        file = folder / f"{rank}.error"
        if file.exists():
            failures.append(Failure(rank, *pickle.loads(file.read_bytes())))
        elif code:
            failures.append(Failure(rank, 0.0, None, "", code))
    return first_cause(failures)


def first_cause(failures: Sequence[Failure]) -> BaseException:
    """The earliest error: a rank that fails makes the others fail, perhaps before it has ended."""
    for failure in failures:
        if failure.error is None:
            code = failure.exit_code
            return RuntimeError(
                f"rank {failure.rank} ended with exit code {code} and left no error"
            )
    first = min(failures, key=lambda failure: failure.when)
    if not isinstance(first.error, BaseException):
        return RuntimeError(f"rank {first.rank} raised {first.error}\n{first.text}")
    first.error.add_note(f"raised on rank {first.rank}:\n{first.text}")
    return first.error


def _rank_main(target: Target, folder: str, rank: int, world_size: int, backend: str) -> None:
    import torch
    import torch.distributed as dist

    from trainyard.parallel.gloo import one_worker_per_group

    one_worker_per_group()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    here = Path(folder)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{here / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        # A rank that leaves at once would close the connection of one that still makes it.
        dist.barrier()
        result = find_function(*target)(*pickle.loads((here / "args").read_bytes()))
        (here / f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException as error:
        (here / f"{rank}.partial").write_bytes(pickled_error(error))
        (here / f"{rank}.partial").rename(here / f"{rank}.error")
        os._exit(1)  # skips destructors, which would wait for the other ranks


def pickled_error(error: BaseException) -> bytes:
    """The arguments of a `Failure`: time, error, traceback."""
    when, text = time.monotonic(), traceback.format_exc()
    try:
        data = pickle.dumps((when, error, text))
        pickle.loads(data)  # some exceptions can be pickled but not unpickled
    except Exception:
        return pickle.dumps((when, repr(error), text))
    return data


def target_of(fn: Callable[..., Any]) -> Target:
    """The place where another process finds the function."""
    return inspect.getfile(fn), fn.__module__, fn.__qualname__


def find_function(file: str, module_name: str, qualname: str) -> Callable[..., Any]:
    """The function, from a module that pytest may have imported under another name."""
    module = sys.modules.get(module_name)
    if module is None:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            spec = importlib.util.spec_from_file_location(module_name, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
