"""The process of the engine, as the process that listens sees it. No torch."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from base64 import b64decode
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from stages.serve.config import ServeConfig
from trainyard.artifacts import retry
from trainyard.config import to_dict
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.errors import InfrastructureError
from trainyard.inference.engine import EngineStats
from trainyard.machine import death_by_signal, memory_kills
from trainyard.retrieval.shape import NeighborShape
from trainyard.serving.wire import Channel, ConnectionLost, decoded_error, decoded_stats
from trainyard.tokenizers.base import Tokenizer

PROGRAM = "stages.serve.engine"
LESS_MEMORY = "lower --inference-dynamic-batching-buffer-size-gb, or request more memory"
CLOSED_SECONDS = 2.0
"""Within which a process ends whose connection is gone."""
END_SECONDS = 20.0
"""Within which an engine that is to end tells the other ranks, and leaves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the engine says once it is ready."""

    tokenizer: Tokenizer
    end_token: int
    max_tokens: int
    kind: str
    num_ranks: int
    neighbors: NeighborShape | None
    stats: EngineStats


class EngineProcess:
    """A child that loads the model and runs it; it ends with the context, and with this process.

    On several ranks the child is the first of them: this process joins no group."""

    def __init__(self, config: ServeConfig) -> None:
        self.connection, theirs = socket.socketpair()
        self._kills = memory_kills()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(number), str(os.getpid())],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
            )
        self._channel = Channel(self.connection)
        level = logging.getLogger("stages").getEffectiveLevel()
        waits, known = retry.state_for_child()
        settings = {"waits": waits, "known_stores": sorted(known)}
        self._say({"config": to_dict(config), "log_level": logging.getLevelName(level), **settings})

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self.connection.close()
        try:
            self._process.wait(END_SECONDS if error is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def loaded(self) -> Loaded:
        """Waits until the model is loaded. Raises what the engine could not begin with."""
        try:
            document = self._channel.receive_one()
        except ConnectionLost:
            raise self._not_begun() from None
        if "failure" in document:
            raise decoded_error(document["failure"])
        return _loaded(document)

    def why_gone(self) -> str:
        """What ended a child that has closed its connection."""
        try:
            status = self._process.wait(CLOSED_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if status >= 0:
            return f"its process ended with exit status {status}"
        return str(death_by_signal("its process", -status, self._kills, LESS_MEMORY))

    def _say(self, document: dict[str, Any]) -> None:
        try:
            self._channel.send(document)
        except ConnectionLost:
            raise self._not_begun() from None

    def _not_begun(self) -> InfrastructureError:
        return InfrastructureError(f"the engine ended before it was ready: {self.why_gone()}")


def _loaded(document: dict[str, Any]) -> Loaded:
    files = {name: b64decode(text) for name, text in document.pop("tokenizer").items()}
    shape, stats = document.pop("neighbors"), document.pop("stats")
    return Loaded(
        tokenizer=tokenizer_of(files),
        neighbors=None if shape is None else NeighborShape(**shape),
        stats=decoded_stats(stats),
        **document,
    )
