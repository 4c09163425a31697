"""Neither a gone worker nor an unavailable server costs a flow its log."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.logging.handlers import APILogWorker
from rich.console import Console

from flows.logs import prefect_handlers
from flows.logs.prefect_handlers import keep_lines


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "on_broken_pipe", Console.on_broken_pipe)  # restored afterwards
    monkeypatch.setattr(APILogWorker, "_handle_batch", APILogWorker._handle_batch)
    monkeypatch.setattr(prefect_handlers, "AGAIN_SECONDS", 0.01)
    keep_lines()


class Broken(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_line_for_a_worker_that_is_gone_does_not_end_the_flow() -> None:
    console = Console(file=Broken())
    console.print("first")
    console.print("second")


class Server:
    """Answers with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.lines = list(errors), list[dict[str, Any]]()

    async def create_logs(self, lines: list[dict[str, Any]]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.lines += lines


def send(server: Server, is_ending: bool = False) -> list[dict[str, Any]]:
    worker: Any = SimpleNamespace(_client=server, _stopped=is_ending)
    asyncio.run(APILogWorker._handle_batch(worker, [{"message": "step 7"}]))
    return server.lines


def answer(status: int) -> Exception:
    request = httpx.Request("POST", "http://server/logs")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status))


def test_lines_wait_until_the_server_is_back() -> None:
    away = httpx.ConnectError("refused")
    assert send(Server(away, answer(503), away)) == [{"message": "step 7"}]


def test_refused_lines_are_dropped_and_so_are_those_of_a_flow_that_ends() -> None:
    assert send(Server(answer(422))) == []
    assert send(Server(httpx.ConnectError("refused")), is_ending=True) == []
