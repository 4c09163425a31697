"""A server of OpenAI's interface on localhost that answers as each prompt says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """What it was asked, and how many requests were under way at most."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    disconnected: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected += 1
            raise
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_chat = request.path.endswith("/chat/completions")
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        first, gap, kind = 0.0, 0.0, "tokens"
        if isinstance(prompt, str) and ":" in prompt:
            kind, *numbers = prompt.split(":")
            first, gap = (float(n) / 1e3 for n in numbers[:2])
        if kind == "busy":
            error = {"error": {"message": "too many\nrequests"}}
            return web.json_response(error, status=429, headers={"Retry-After": "1"})
        if kind == "whole":
            return web.json_response({"choices": [{"text": "a"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(document: Any) -> None:
            text = document if isinstance(document, str) else json.dumps(document)
            await response.write(f"data: {text}\r\n\r\n".encode())

        def choice(text: str, reason: str | None = None) -> dict[str, Any]:
            piece = {"delta": {"content": text}} if is_chat else {"text": text}
            return {"choices": [{"index": 0, **piece, "finish_reason": reason}]}

        if is_chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await response.write(b": a comment\n\n")
        await asyncio.sleep(first)
        for number in range(body["max_tokens"]):
            if number:
                await asyncio.sleep(gap)
            if kind == "cut" and number == 1:
                assert request.transport is not None
                request.transport.close()
                return response
            if kind == "short" and number == 1:
                return response
            if kind == "fault" and number == 1:
                await send({"error": {"message": "out of blocks"}})
                return response
            if kind != "mute":
                await send(choice("ab"))
        await send(choice("", "length"))
        if kind != "uncounted" and body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
            await send({"choices": [], "usage": usage})
        await send("[DONE]")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}, {"id": "other"}]})


@asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    """A server on a free port."""
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
