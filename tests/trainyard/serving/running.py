"""A server in a thread of this process, over a tiny model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.inference.small_models import FIRST_TOKEN, VOCAB
from trainyard.hosts import OURS
from trainyard.inference.dynamic.build import build_engine
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.engine import Engine
from trainyard.inference.load import ModelOnRanks, load_on_ranks
from trainyard.models.gpt.config import GPTConfig
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.serving.config import DefaultsConfig, LimitConfig
from trainyard.serving.engine_calls import calls_of
from trainyard.serving.engine_side import engine_in_thread
from trainyard.serving.outputs import ServedModel
from trainyard.serving.server import Server, bind
from trainyard.serving.service import EngineService

MODEL = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=64)
NAME = "tiny"
SMALL = DynamicConfig(
    inference_dynamic_batching_block_size=8, inference_dynamic_batching_max_requests=8
)


def load_tiny(folder: Path) -> ModelOnRanks:
    """A byte-level model of 64 positions, from a checkpoint."""
    save_gpt(str(folder), random_gpt(MODEL))
    return load_on_ranks(str(folder), torch.device("cpu"))


def loaded_of(model: Any, groups: ProcessGroups = ALONE) -> ModelOnRanks:
    """A model of `small_models` as a checkpoint gives it, whose tokenizer only counts."""
    tokenizer: Any = type("Words", (), {"vocab_size": VOCAB})
    return ModelOnRanks(model, tokenizer, groups, "", 0, FIRST_TOKEN, 0)


class Running:
    """A server that runs."""

    def __init__(self, server: Server, served: ServedModel) -> None:
        self.url, self.server, self.served = "", server, served
        self.failure: BaseException | None = None
        """What ended it, if something did."""
        self.thread = threading.current_thread()
        """In which it runs."""
        self.loop: asyncio.AbstractEventLoop | None = None

    def begin(self, url: str) -> None:
        """It listens here."""
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def put(self, **fields: Any) -> httpx.Response:
        return self.client.put("/api", json=fields)


@contextmanager
def running(
    generator: ModelOnRanks,
    *,
    engine: Engine | None = None,
    key: str | None = None,
    defaults: DefaultsConfig | None = None,
    **limits: Any,
) -> Iterator[Running]:
    """Serve a model until the end of the context."""
    engine = engine or build_engine(generator, SMALL)
    with ExitStack() as stack:
        connection = stack.enter_context(
            engine_in_thread(engine, generator.tokenizer, calls_of(generator))
        )
        served = served_model(generator, engine, connection, defaults, LimitConfig(**limits))
        server = Server(served, names=OURS, key=key)
        yield stack.enter_context(_serving(Running(server, served)))


def served_model(
    generator: ModelOnRanks,
    engine: Engine,
    connection: socket.socket,
    defaults: DefaultsConfig | None,
    limits: LimitConfig,
) -> ServedModel:
    kind = generator.config.model_type
    return ServedModel(
        name=NAME,
        tokenizer=generator.tokenizer,
        end_token=generator.end_token,
        service=service_of(engine, connection, limits.max_queued_requests),
        limits=limits,
        defaults=defaults or DefaultsConfig(seed=1),
        kind=kind,
        neighbors=generator.model.config.neighbor_shape() if kind == "retro" else None,
    )


def service_of(engine: Engine, connection: socket.socket, max_queued: int) -> EngineService:
    return EngineService(
        connection, max_tokens=engine.max_tokens, max_queued=max_queued, stats=engine.stats()
    )


@contextmanager
def _serving(found: Running) -> Iterator[Running]:
    server, listening, begun = found.server, bind("127.0.0.1", 0), threading.Event()

    async def work() -> None:
        found.loop = asyncio.get_running_loop()
        await server.run_on(listening, "127.0.0.1", started, signals=())

    def started(address: str) -> None:
        found.begin(address)
        begun.set()

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            found.failure = error

    found.thread = thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30)
    try:
        yield found
    finally:
        found.client.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
