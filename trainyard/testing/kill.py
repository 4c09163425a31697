"""Kills a stage at its n-th store operation, runs it again, and compares: kill-anywhere tests.

    with Zygote("stages.tokenize.run") as zygote:
        check_kill_anywhere(zygote, "stages.tokenize", arguments_for, points=20)

The process sends itself SIGKILL: no handler, clean-up or flush runs, as in a power cut or an
out-of-memory kill. A zygote imports the stage's module once and forks a process for every run, so
that hundreds of runs do not import torch."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest

KILLED = -signal.SIGKILL

TRIALS = 3
"""Attempts to kill a run at some operation, as a run may end before it."""

SOONER = 0.9
"""Share of the operations of such a run, at which the next attempt kills."""

CLAIM = "claim"
"""The thread that renews the claim every few seconds. Its operations are not counted: their number
depends on how busy the machine is."""


class Zygote:
    """A process that imports the given modules, and forks a child for each run of a stage."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainyard.testing.kill", *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def run(self, module: str, arguments: list[str], kill_at: int = 0) -> tuple[int, int, str]:
        """Run a stage as a forked process, killed before its n-th store operation (0: never).

        Returns exit status (negative: signal), number of operations, and log."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"module": module, "arguments": arguments, "kill_at": kill_at}
        request["environment"] = dict(os.environ)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the zygote is gone, exit status {self._process.poll()}"
        reply = json.loads(line)
        return int(reply["status"]), int(reply["operations"]), str(reply["log"])


def spread(total: int, points: int) -> list[int]:
    """At most `points` operation numbers between the first and the last one, evenly spread."""
    if total <= points:
        return list(range(1, total + 1))
    return sorted({1 + round(i * (total - 1) / (points - 1)) for i in range(points)})


def check_kill_anywhere(
    zygote: Zygote,
    module: str,
    arguments: Callable[[str], list[str]],
    manifest_url: Callable[[str], str],
    points: int,
) -> int:
    """Check that a run that was killed and repeated has the output digest of an undisturbed one.

    `arguments` and `manifest_url` return the command line and the manifest of a run by its name.
    Returns the number of kills. Raises AssertionError with the log of the failed run."""
    status, _, log = zygote.run(module, arguments("undisturbed"))
    assert status == 0, f"the undisturbed run failed ({status}):\n{log}"
    expected = _digest(manifest_url("undisturbed"))
    # Counted in a second run: the first one also computed digests that are cached now.
    _, operations, log = zygote.run(module, arguments("again"))
    assert _digest(manifest_url("again")) == expected, f"two runs differ:\n{log}"
    kills = spread(operations, points)
    for number in kills:
        at, name = kill_a_run(zygote, module, arguments, number)
        status, _, log = zygote.run(module, arguments(name))
        assert status == 0, f"operation {at}: the run after the kill failed ({status}):\n{log}"
        found = _digest(manifest_url(name))
        assert found == expected, f"operation {at}: {found} differs from {expected}:\n{log}"
    return len(kills)


def kill_a_run(
    zygote: Zygote, module: str, arguments: Callable[[str], list[str]], number: int
) -> tuple[int, str]:
    """Kill a run before an operation. Returns the number of the operation and the name of the run.

    The number of operations differs a little from run to run: a file that was just written is read
    again for its digest, or a copy in the background is cancelled. If a run ends before the
    operation, another one is killed earlier."""
    point = number
    for trial in range(TRIALS):
        name = f"kill-{point}" + f"-{trial}" * (trial > 0)
        status, operations, log = zygote.run(module, arguments(name), kill_at=number)
        if status == KILLED:
            return number, name
        assert status == 0, f"operation {number}: not killed but ended with {status}:\n{log}"
        assert 0 < operations < number, f"operation {number} did not kill the run:\n{log}"
        number = max(1, round(operations * SOONER))
    raise AssertionError(f"{TRIALS} runs ended before the operation at which to kill them")


def _digest(manifest_url: str) -> str:
    found = read_manifest(manifest_url)
    assert found is not None, f"{manifest_url}: no manifest after a successful run"
    return found[0].output_digest


# --- in the zygote ----------------------------------------------------------------------------


def _serve(modules: list[str]) -> None:
    for module in modules:
        __import__(module)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_run_forked(request)), flush=True)


def _run_forked(request: dict[str, Any]) -> dict[str, Any]:
    log, count = (os.memfd_create(name) for name in ("log", "count"))
    child = os.fork()
    if child == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(_child(request, count))
    _, status = os.waitpid(child, 0)
    reply = {"status": os.waitstatus_to_exitcode(status), "log": _contents(log)}
    reply["operations"] = int(_contents(count) or 0)
    return reply


def _child(request: dict[str, Any], count: int) -> int:
    os.environ.clear()
    os.environ.update(request["environment"])
    _observe(count, request["kill_at"])
    sys.argv = [request["module"], *request["arguments"]]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _observe(count: int, kill_at: int) -> None:
    numbers = itertools.count(1)
    lock = threading.Lock()
    mine = os.getpid()

    def observe(operation: str, url: str) -> None:
        if os.getpid() != mine:
            return  # a worker process of the stage
        if threading.current_thread().name == CLAIM:
            return
        with lock:  # operations of saving threads are numbered too
            number = next(numbers)
            os.pwrite(count, str(number).encode(), 0)
            if number == kill_at:
                os.kill(mine, signal.SIGKILL)

    store.observers.append(observe)


def _contents(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    _serve(sys.argv[1:])
