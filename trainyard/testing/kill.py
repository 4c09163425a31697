"""Kill a stage at its n-th store operation, run it again, compare: the kill-anywhere harness.

    with Zygote("stages.tokenize.run") as zygote:
        check_kill_anywhere(zygote, "stages.tokenize", arguments_for, points=20)

The kill is SIGKILL from inside: no handler, no clean-up, no flush, as a power cut or an
out-of-memory killer would have it. A zygote imports the stage's module once and forks a process for
every run, so that hundreds of runs of a stage with torch take seconds each, not the seconds of its
import."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest

KILLED = -signal.SIGKILL


class Zygote:
    """A process that has imported the modules named, and forks a child for each run of a stage."""

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

        Returns exit status (negative: signal), operations made, and what it logged."""
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
    """Run undisturbed, then killed at every point and run again: all output digests are equal.

    `arguments` and `manifest_url` make a command line and a place from the name of a run.
    Returns the number of kills. Raises AssertionError with the log of the run that went wrong."""
    status, _, log = zygote.run(module, arguments("undisturbed"))
    assert status == 0, f"the undisturbed run failed ({status}):\n{log}"
    expected = _digest(manifest_url("undisturbed"))
    # Counted in a second run: the first one also read what digests are remembered for.
    _, operations, log = zygote.run(module, arguments("again"))
    assert _digest(manifest_url("again")) == expected, f"two runs differ:\n{log}"
    kills = spread(operations, points)
    for number in kills:
        name = f"kill-{number}"
        status, _, log = zygote.run(module, arguments(name), kill_at=number)
        assert status == KILLED, f"operation {number}: not killed but ended with {status}:\n{log}"
        status, _, log = zygote.run(module, arguments(name))
        assert status == 0, f"operation {number}: the run after the kill failed ({status}):\n{log}"
        found = _digest(manifest_url(name))
        assert found == expected, f"operation {number}: {found} differs from {expected}:\n{log}"
    return len(kills)


def _digest(manifest_url: str) -> str:
    found = read_manifest(manifest_url)
    assert found is not None, f"{manifest_url}: no manifest after a run that ended well"
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
    seen = 0
    mine = os.getpid()

    def observe(operation: str, url: str) -> None:
        nonlocal seen
        if os.getpid() != mine:
            return  # a worker process of the stage
        seen += 1
        os.pwrite(count, str(seen).encode(), 0)
        if seen == kill_at:
            os.kill(mine, signal.SIGKILL)

    store.observers.append(observe)


def _contents(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    _serve(sys.argv[1:])
