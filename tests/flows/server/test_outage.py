"""Prefect's loops outlive an outage of the server, which is reported once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from flows.server.outage import Outage, print_line


def test_an_outage_of_the_server_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    outage, answers = Outage(print_line), list[Exception | None]()
    answers += [httpx.ConnectError("refused"), unavailable(), None, None]

    async def workload() -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    async def turns() -> None:
        for _ in range(4):
            await outage.tolerant(workload)()
        answers.append(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await outage.tolerant(workload)()

    asyncio.run(turns())
    away, back = capsys.readouterr().err.splitlines()
    assert "does not answer; trying again until it does" in away
    assert "answers again after 0 s" in back


def unavailable() -> Exception:
    request = httpx.Request("POST", "http://server/flow_runs")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(503))
