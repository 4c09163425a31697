"""Random requests, cancels and disconnects: nothing fails, and nothing stays in use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.soak_traffic import WRONG_COUNT, Traffic, held_at_the_end
from tests.trainyard.serving.running import Running

pytestmark = pytest.mark.slow

KINDS = ("stream", "plain", "megatron")


def test_clients_that_leave_hurt_no_other_one_and_leave_no_block(server: Running) -> None:
    async def work() -> tuple[Traffic, dict[str, float]]:
        async with aiohttp.ClientSession() as session:
            sizes = {"prompt_tokens": (1, 24), "new_tokens": (1, 40)}
            traffic = Traffic(server.url, session, seed=2, **sizes)
            await traffic.run(rate=20.0, seconds=4.0)
            return traffic, await held_at_the_end(session, server.url)

    traffic, in_use = asyncio.run(work())
    assert not traffic.found.errors
    assert set(in_use.values()) == {0.0}
    ends = traffic.found.ends
    assert min(ends[f"{kind} done"] for kind in KINDS) > 0
    assert sum(count for end, count in ends.items() if end.endswith("left")) > 0


async def answers_nothing(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


async def answers_without_tokens(request: web.Request) -> web.Response:
    fields = await request.json()
    if "prompts" in fields:
        return web.json_response({"tokens": [[97] * len(text) for text in fields["prompts"]]})
    if fields.get("stream"):
        return web.Response(text='data: {"choices": []}\n\ndata: [DONE]\n\n')
    return web.json_response({"choices": []})


def errors_of(answer: Callable[[web.Request], Awaitable[web.Response]]) -> dict[str, int]:
    """What the clients of a server that answers so take for errors."""

    async def put(request: web.Request) -> web.Response:
        is_first = (await request.json())["tokens_to_generate"] == 0
        return await (answers_without_tokens if is_first else answer)(request)

    async def work() -> dict[str, int]:
        app: Any = web.Application()
        app.router.add_post("/v1/completions", answer)
        app.router.add_put("/api", put)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        timeout = aiohttp.ClientTimeout(total=0.5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            traffic = Traffic(f"http://{host}:{port}", session, seed=1)
            await traffic.run(rate=40.0, seconds=1.0)
        await runner.cleanup()
        assert not any(end.endswith("done") for end in traffic.found.ends)
        return dict(traffic.found.errors)

    return asyncio.run(work())


def test_a_request_that_is_never_answered_is_an_error() -> None:
    assert errors_of(answers_nothing).keys() == {f"{kind}: no answer in time" for kind in KINDS}


def test_an_answer_without_tokens_is_an_error() -> None:
    found = errors_of(answers_without_tokens)
    silent = "WrongAnswerError: an answer that does not say how many tokens it has"
    assert found.keys() == {
        f"stream: {silent}",
        f"plain: {silent}",
        f"megatron: WrongAnswerError: {WRONG_COUNT}",
    }
