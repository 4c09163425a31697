"""The dynamic engine in this process, as the target of a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from stages.benchmark.config import BenchmarkConfig
from trainyard.inference.dynamic.build import build_engine
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.ranks import Follower
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.on_ranks import model_on_ranks
from trainyard.inference.prompts import chat_tokens, prompt_tokens
from trainyard.inference.request import Request
from trainyard.inference.texts import TextRequests
from trainyard.load_test.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class EngineHere:
    """On the first rank."""

    engine: DynamicEngine
    generator: ModelOnRanks


@contextmanager
def engine_here(config: BenchmarkConfig) -> Iterator[EngineHere | None]:
    """The engine of the options, on the first rank; None on the others, once it has ended."""
    with model_on_ranks(config) as generator:
        most = config.inference_max_seq_length
        engine = build_engine(generator, config.engine, max_seq_length=most)
        if isinstance(engine, Follower):
            engine.run()
            yield None
            return
        with engine:
            yield EngineHere(engine, generator)


class EngineRequests:
    """Requests to the engine of the planned ones."""

    def __init__(self, config: BenchmarkConfig, generator: ModelOnRanks) -> None:
        self._config, self._tokenizer = config, generator.tokenizer
        self._requests = TextRequests(
            generator, config.sampling, config.generation, 1, ignore_end=config.ignore_eod
        )

    def __call__(self, planned: PlannedRequest) -> Request:
        """ConfigError for a prompt that does not fit."""
        request = self._requests.make(self._tokens(planned), planned.index, "a prompt")
        return replace(request, max_tokens=planned.max_tokens)

    def _tokens(self, planned: PlannedRequest) -> tuple[int, ...] | list[int]:
        if not isinstance(planned.prompt, str):
            return planned.prompt
        if self._config.chat:
            return chat_tokens(self._tokenizer, planned.prompt)
        add_bos = self._config.generation.add_bos
        return prompt_tokens(self._tokenizer, planned.prompt, add_bos=add_bos)
