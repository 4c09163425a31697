"""A server whose engine ends, and one that ends itself: nothing hangs."""

from __future__ import annotations

import asyncio
import copy
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from tests.trainyard.serving.running import Running, running
from tests.trainyard.serving.test_service import Counting
from trainyard.errors import ConfigError
from trainyard.inference.engine import Update
from trainyard.inference.load import ModelOnRanks
from trainyard.serving import server as serving_server
from trainyard.serving.server import bind

pytestmark = pytest.mark.slow


class Gated(Counting):
    """Makes a token each time that the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)

    def step(self) -> list[Update]:
        if self.running and not self.gate.acquire(timeout=0.01):
            return []
        return super().step()


@pytest.fixture
def gated(generator: ModelOnRanks) -> Iterator[tuple[Running, Gated]]:
    engine = Gated()
    with running(generator, engine=engine, drain_seconds=20) as found:
        yield found, engine


def signalled(server: Running) -> None:
    """SIGTERM, as the server's own handler gets it."""
    assert server.loop is not None
    server.loop.call_soon_threadsafe(server.server._on_signal, signal.SIGTERM)


def until_ended(server: Running, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while server.thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_that_fails_ends_the_server_and_every_request(generator: ModelOnRanks) -> None:
    (first,) = generator.tokenizer.encode("x")
    with running(generator, engine=Counting(fails_at=first)) as server:
        assert server.client.get("/health").status_code == 200
        reply = server.post("/v1/completions", prompt="x")
        assert reply.status_code == 503
        assert "the device is gone" in reply.json()["error"]["message"]
        until_ended(server)
    assert isinstance(server.failure, RuntimeError)


def test_health_says_that_the_engine_failed(generator: ModelOnRanks) -> None:
    (first,) = generator.tokenizer.encode("x")
    with running(generator, engine=Counting(fails_at=first)) as server:
        server.served.service.on_failure = lambda: None  # stay, to be asked
        server.post("/v1/completions", prompt="x")
        for path in ("/health", "/health/live", "/health/ready"):
            assert server.client.get(path).status_code == 503, path
        assert server.client.get("/health").json()["status"] == "failed"
        assert server.post("/v1/completions", prompt="a").status_code == 503


def test_a_stream_that_has_begun_ends_with_the_failure(gated: tuple[Running, Gated]) -> None:
    server, engine = gated
    engine.gate.release()
    body = {"prompt": "a", "max_tokens": 50, "stream": True, "n": 2}
    with server.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        engine.step = _fails  # type: ignore[method-assign]
        last = list(lines)[-1]
    assert "the device is gone" in last


def _fails() -> list[Update]:
    raise RuntimeError("the device is gone")


def test_a_drain_finishes_what_runs_and_takes_nothing_new(gated: tuple[Running, Gated]) -> None:
    server, engine = gated
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=3)
        while not engine.running:
            time.sleep(0.01)
        signalled(server)
        while server.client.get("/health/ready").status_code != 503:
            time.sleep(0.01)
        assert server.client.get("/health/live").status_code == 200
        late = server.post("/v1/completions", prompt="a")
        assert late.status_code == 503
        assert "retry-after" in late.headers
        assert server.put(prompts=["a"]).status_code == 503
        assert not begun.done()
        engine.gate.release(3)
        assert begun.result().status_code == 200
    until_ended(server)
    assert server.failure is None


def test_a_drain_ends_at_its_limit(generator: ModelOnRanks) -> None:
    engine = Gated()
    with (
        running(generator, engine=engine, drain_seconds=0.1) as server,
        ThreadPoolExecutor() as pool,
    ):
        begun = pool.submit(server.post, "/v1/completions", prompt="a")
        while not engine.running:
            time.sleep(0.01)
        signalled(server)
        until_ended(server, 1.5)
        assert begun.result().status_code == 503
        assert "has ended before" in begun.result().text
    assert server.failure is None


def test_a_port_in_use_is_refused_in_words() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be listened on"):
            bind("127.0.0.1", port)


def test_a_client_that_never_reads_is_dropped(
    generator: ModelOnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_server, "UNREAD_SECONDS", 0.5)
    with running(generator) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        port = int(server.url.rpartition(":")[2])
        client.connect(("127.0.0.1", port))
        client.settimeout(0.1)
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with pytest.raises(TimeoutError):  # the server takes no more, as its answers wait
            client.sendall(100_000 * ask)
        connections = server.server.server_state.connections
        assert len(connections) == 1
        deadline = time.monotonic() + 10
        while connections:
            assert time.monotonic() < deadline, "it still waits"
            time.sleep(0.01)
        assert server.client.get("/health").status_code == 200


def test_a_client_that_hangs_up_before_its_answer_cancels_it(
    gated: tuple[Running, Gated],
) -> None:
    server, engine = gated

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            asked = asyncio.ensure_future(client.put("/api", json={"prompts": ["a"]}))
            while not engine.running:
                await asyncio.sleep(0.01)
            asked.cancel()

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while engine.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.cancelled == [1]


def test_a_text_with_nan_logits_fails_alone(generator: ModelOnRanks) -> None:
    model = copy.deepcopy(generator.model)
    with torch.no_grad():
        model.embedding.position_embeddings.weight[20] = torch.nan
    broken = replace(generator, model=model)
    said = "the model computes NaN or infinite logits for this text"
    with running(broken) as server:
        long: dict[str, Any] = {"prompt": "a" * 18, "max_tokens": 8, "ignore_eos": True}
        for _ in range(2):
            reply = server.post("/v1/completions", **long)
            assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
            assert reply.json()["error"]["message"].startswith(said)
            assert server.post("/v1/completions", **long | {"max_tokens": 3}).status_code == 200
        reply = server.put(prompts=["a" * 30], tokens_to_generate=0, logprobs=True)
        assert reply.status_code == 500
        assert reply.json()["message"].startswith(said)
        streamed = server.post("/v1/completions", **long, stream=True).text
        assert said in streamed.rstrip().splitlines()[-1]
        assert server.client.get("/health").status_code == 200
        assert server.served.service.stats.blocks_used == 0
