"""Deployments on a real server, and workers that run them."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from flows.cli.run_flow import ENVIRONMENT
from tests.ports import free_port
from tests.yard.faults.faults import PASSWORD
from tests.yard.yard import Yard

START_SECONDS = 90
BUSY_SECONDS = 30
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def answer_of(request: urllib.request.Request) -> bytes:
    """What a server answers; asked again while its database is busy (503), as Prefect's client
    does."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(1)


class Api:
    """Requests to a Prefect server."""

    def __init__(self, url: str, password: str = PASSWORD, has_csrf: bool = False) -> None:
        """url: that of its API; password: USER:PASSWORD, for a server that asks for one."""
        self.url = url
        self._password = password
        self._has_csrf = has_csrf

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """An answer of its API; None when it says nothing."""
        head = {"Content-Type": "application/json"}
        if self._password:
            head["Authorization"] = f"Basic {base64.b64encode(self._password.encode()).decode()}"
        if body is not None and self._has_csrf:
            csrf = self.ask("csrf-token?client=tests")
            head |= {"Prefect-Csrf-Token": csrf["token"], "Prefect-Csrf-Client": "tests"}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}/{path}", data, head, method=method)
        text = answer_of(asked)
        return json.loads(text) if text else None

    def state(self, run: str) -> str:
        """The type of the state that a flow run is in."""
        return str(self.ask(f"flow_runs/{run}")["state_type"])

    def of_run(self, kind: str, run: str) -> list[dict[str, Any]]:
        """Everything of a kind that a flow run has: task_runs, artifacts, logs."""
        asked = {"flow_runs": {"id": {"any_": [run]}}}
        if kind == "logs":
            asked = {"logs": {"flow_run_id": {"any_": [run]}}}
        return list(self.ask(f"{kind}/filter", asked))

    def begin(self, deployment: str, **parameters: Any) -> str:
        """Ask for a run of FLOW/YARD; its id."""
        there = self.ask(f"deployments/name/{deployment}")["id"]
        asked = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.ask(f"deployments/{there}/create_flow_run", asked)["id"])

    def deployments(self) -> list[str]:
        """The names of all, without their flows."""
        return [str(one["name"]) for one in self.ask("deployments/filter", {})]

    def cancel(self, run: str) -> None:
        """What the button of the run's page sends."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.ask(f"flow_runs/{run}/set_state", {"state": state})

    def press_retry(self, run: str) -> None:
        """What the button of the run's page sends."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        done = self.ask(f"flow_runs/{run}/set_state", {"state": state, "force": False})
        assert done["status"] == "ACCEPT", done


class WholeServer(Api):
    """A Prefect server with all its services, among them the one that runs automations."""

    def __init__(self, folder: Path, password: str = "", **more: str) -> None:
        """password: USER:PASSWORD that it asks for, with CSRF protection; none when empty. more:
        settings of the server."""
        self.folder = folder
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}/api", password, bool(password))
        settings = {"PREFECT_HOME": str(folder / "home"), "PREFECT_UI_ENABLED": "false", **more}
        if password:
            settings["PREFECT_SERVER_API_AUTH_STRING"] = password
            settings["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] = "true"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self._port, self._settings = port, {**kept, **ENVIRONMENT, **settings}
        self.start()

    def start(self) -> None:
        """Start it, the first time or after it was killed."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(self._port)],
            env=self._settings,
            stdout=(self.folder / "server.log").open("a"),
            stderr=subprocess.STDOUT,
        )

    @property
    def environment(self) -> dict[str, str]:
        """What leads a program to it."""
        given = {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.folder / "client")}
        return {**ENVIRONMENT, **given}

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(urllib.error.URLError, OSError):
                self.ask("health")
                return
            time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text())

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.process.kill()
        self.process.wait()


def comes(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether it comes to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)
    return bool(condition())


def register(yard: Yard, profile: str) -> None:
    """Tell the yard's server all that a profile needs."""
    done = yard.run("-m", "flows.register", "--yard", profile)
    assert done.status == 0, done.out + done.err


@contextmanager
def working(
    yard: Yard,
    pool: str,
    name: str = "worker",
    *more: str,
    program: Sequence[str] = ("prefect", "worker", "start"),
) -> Iterator[Worker]:
    """A worker of a pool, for as long as this lasts."""
    with (yard.folder / f"{name}.txt").open("w") as output_file:
        arguments = ("--pool", pool, "--name", name, *more)
        process = yard.start("-m", *program, *arguments, stderr=output_file)
    worker = Worker(process, Path(output_file.name))
    try:
        yield worker
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=20)
        worker.power_off()
        process.communicate()


class Worker:
    """A worker and the flow runs that it has started."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def output(self) -> str:
        """By it, and by its flow runs."""
        return self._log.read_text()

    def power_off(self) -> None:
        """End it and all below it as a machine would that loses power."""
        below = [self.process.pid]
        for pid in below:
            below += _children(pid)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = place.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                found.append(int(place.parent.name))
    return found


def pids(mark: str) -> list[int]:
    """Processes whose command line has a text."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "cmdline").read_bytes().replace(b"\0", b" ").decode():
                found.append(int(place.name))
    return found
