"""The dynamic engine in this process, as the target of a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from stages.benchmark.config import BenchmarkConfig
from trainyard.inference.dynamic.build import build_engine
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.ranks import Follower
from trainyard.inference.load import ModelOnRanks, load_on_ranks
from trainyard.inference.request import Request
from trainyard.inference.texts import TextRequests, chat_tokens, prompt_tokens
from trainyard.load_test.workload import PlannedRequest
from trainyard.parallel.device import resolve_device
from trainyard.parallel.groups import process_groups
from trainyard.parallel.launcher import rank_of_environment


@dataclass(frozen=True, slots=True)
class EngineHere:
    """On the first rank."""

    engine: DynamicEngine
    generator: ModelOnRanks


@contextmanager
def engine_here(config: BenchmarkConfig) -> Iterator[EngineHere | None]:
    """The engine of the options, on the first rank; None on the others, once it has ended."""
    _, _, local_rank, _ = rank_of_environment()
    device = resolve_device(config.device, local_rank)
    assert config.load is not None, "the options see to it"
    with process_groups(config.layout.parallel(), device) as groups:
        dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
        generator = load_on_ranks(
            config.load,
            device,
            dtype=dtype,
            layout=config.layout,
            groups=groups,
            expect=config.expect,
        )
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
