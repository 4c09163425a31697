"""Sends a load of requests to a server or to the dynamic engine, and measures each."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from stages.benchmark.config import BenchmarkConfig
from stages.benchmark.engine_here import EngineHere, EngineRequests, engine_here
from stages.benchmark.load_report import report_page, verdict
from stages.benchmark.prompts import ordinary_tokens
from stages.runtime.context import StageRun
from trainyard.artifacts.inputs import read_checked
from trainyard.charts.numbers import NARROW, milliseconds, three
from trainyard.charts.numbers import shown as shown_value
from trainyard.charts.text_table import text_table
from trainyard.config import differing
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.inference.load import load_tokenizer
from trainyard.inference.prompts import read_prompts
from trainyard.load_test.config import MAX_REQUESTS
from trainyard.load_test.driver import Target
from trainyard.load_test.engine_target import EngineTarget
from trainyard.load_test.http_target import HttpTarget
from trainyard.load_test.lengths import LengthDistribution
from trainyard.load_test.measurement import LoadTest, LoadTestResult
from trainyard.load_test.workload import (
    PlannedRequest,
    PromptMaker,
    TraceLine,
    read_trace,
    synthetic_requests,
    text_requests,
    trace_requests,
)
from trainyard.parallel.device import device_name
from trainyard.serving.engine_side import engine_in_thread
from trainyard.serving.service import EngineService
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
API_KEY = "OPENAI_API_KEY"


class Workload:
    """The requests of the options."""

    def __init__(self, config: BenchmarkConfig, tokenizer: Tokenizer | None) -> None:
        """tokenizer: of --load; needed for random prompts and for an engine in this process."""
        self._config, self._tokenizer = config, tokenizer
        load, self._seed = config.load_test, config.sampling.seed
        self._outputs = load.outputs() or fixed(config.num_tokens_to_generate)
        count = config.num_input_tokens
        self._inputs = load.inputs() or (None if count is None else fixed(count))
        self._texts: list[str] = []
        self.trace: list[TraceLine] = []
        if load.trace_file is not None:
            self.trace = read_trace(read_checked(load.trace_file), load.trace_file)
        elif self._inputs is None:
            prompts = read_prompts(config.prompts, config.prompt_file, config.prompt_key)
            self._texts = [prompt.text for prompt in prompts]
        needs_maker = self._inputs is not None or any(line.text is None for line in self.trace)
        if needs_maker and tokenizer is None:
            raise ConfigError(
                f"--trace-file {load.trace_file} has lengths of prompts in place of texts; name a "
                "checkpoint with --load, whose tokenizer makes prompts of these lengths"
            )
        self._maker = None
        if needs_maker and tokenizer is not None:
            self._maker = PromptMaker(ordinary_tokens(tokenizer), self._seed)

    def make(self, count: int | None) -> list[PlannedRequest]:
        """So many requests; None: as many as the options say."""
        if self.trace:
            return trace_requests(self.trace, self._maker, self._outputs, self._seed)
        count = count or self._config.load_test.num_requests
        if self._inputs is not None:
            assert self._maker is not None
            most = count or self._config.inference_max_requests
            sizes = self._inputs, self._outputs
            return synthetic_requests(most, self._maker, *sizes, self._seed)
        most = count or len(self._texts)
        return text_requests(most, self._texts, self._outputs, self._seed)


def fixed(length: int) -> LengthDistribution:
    """All of one length."""
    return LengthDistribution("fixed", length)


def run(config: BenchmarkConfig, stage: StageRun) -> dict[str, Any]:
    """Send the load, print the figures; with --output-dir, write requests.jsonl, summary.json and
    the page. InfrastructureError if no request was answered."""
    if config.load_test.url is None:
        with engine_here(config) as engine:
            if engine is None:
                return {}
            result, about = asyncio.run(_measure_engine(config, stage, engine))
    else:
        result, about = asyncio.run(_measure_server(config, stage))
    print("\n".join(shown(result)))
    if not result.completed:
        raise InfrastructureError(
            f"{about['target']}: none of the requests was answered: "
            + "; ".join(result.errors()[:3])
        )
    if "verdict" in about:
        print(about["verdict"])
    if stage.output is not None:
        write(stage, result, about)
    if config.load_test.sweep:
        return {"highest_rate": result.highest_rate}
    last = result.measurements[-1].summary
    keys = ("num_completed", "num_failed", "requests_per_second", "output_tokens_per_second")
    return {key: last[key] for key in keys}


async def _measure_server(
    config: BenchmarkConfig, stage: StageRun
) -> tuple[LoadTestResult, dict[str, Any]]:
    """The result, and what was measured."""
    load, tokenizer = config.load_test, None if config.load is None else load_tokenizer(config.load)
    assert load.url is not None
    workload = Workload(config, tokenizer)
    server = HttpTarget(
        load.url,
        load.endpoint,
        load.model or "",
        request_options(config),
        seed=None if config.sampling.greedy else config.sampling.seed,
        api_key=os.environ.get(API_KEY) or None,
    )
    async with server:
        if load.model is None:
            server.use_model(await server.served_model())
        target = AsTexts(server, tokenizer) if load.endpoint == "chat" else server
        result = await _measure(config, stage, workload, target)
    address = urlsplit(load.url).netloc
    return result, described(config, result, f"the server at {address}", server.model)


async def _measure_engine(
    config: BenchmarkConfig, stage: StageRun, here: EngineHere
) -> tuple[LoadTestResult, dict[str, Any]]:
    """The result, and what was measured."""
    workload = Workload(config, here.generator.tokenizer)
    with engine_in_thread(here.engine, here.generator.tokenizer) as connection:
        service = EngineService(
            connection,
            max_tokens=here.engine.max_tokens,
            max_queued=MAX_REQUESTS,
            stats=here.engine.stats(),
        )
        await service.start()
        try:
            target = EngineTarget(service, EngineRequests(config, here.generator))
            result = await _measure(config, stage, workload, target)
        finally:
            await service.stop()
    stats = here.engine.stats()
    about = described(config, result, "the dynamic engine", str(config.load))
    about |= {"device": device_name(here.generator.model.device), "blocks": stats.blocks_total}
    about |= {name: getattr(stats, name) for name in ("cached_prompt_tokens", "preemptions")}
    return result, about


async def _measure(
    config: BenchmarkConfig, stage: StageRun, workload: Workload, target: Target
) -> LoadTestResult:
    with stage.progress(None, "requests", "load") as progress:
        test = LoadTest(
            config.load_test,
            target,
            workload.make,
            trace_times=[line.at for line in workload.trace],
            seed=config.sampling.seed,
            on_end=progress.update,
        )
        await test.warm_up(config.num_warmups)
        return await test.run(config.inference_repeat_n)


class AsTexts:
    """A target that takes texts alone: prompts of tokens are decoded."""

    def __init__(self, target: Target, tokenizer: Tokenizer | None) -> None:
        self._target, self._tokenizer = target, tokenizer

    async def send(self, request: PlannedRequest, answer: Any) -> None:
        """See `Target`."""
        if not isinstance(request.prompt, str):
            assert self._tokenizer is not None
            request = replace(request, prompt=self._tokenizer.decode(list(request.prompt)))
        await self._target.send(request, answer)


def request_options(config: BenchmarkConfig) -> dict[str, Any]:
    """Keys of each request to a server: temperature and top_p as OpenAI's, and others only where
    the options differ from their defaults, since not every server knows them."""
    sampling, output = config.sampling, config.generation
    if sampling.greedy:
        options: dict[str, Any] = {"temperature": 0.0}
    else:
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
        options |= {"top_k": sampling.top_k} if sampling.top_k else {}
    same = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = differing(sampling)
    options |= {name: given[name] for name in same if name in given}
    if config.ignore_eod:
        options["ignore_eos"] = True
    if output.min_tokens:
        options["min_tokens"] = output.min_tokens
    if output.stop_words:
        options["stop"] = list(output.stop_words)
    return options


# --- documents --------------------------------------------------------------------------------


def described(
    config: BenchmarkConfig, result: LoadTestResult, target: str, model: str
) -> dict[str, Any]:
    """What was measured, and how, for documents and the page."""
    load = config.load_test
    of_load = {name: shown_value(v) for name, v in differing(load).items() if name != "url"}
    about: dict[str, Any] = {"target": target, "model": model, **of_load}
    if config.num_input_tokens is not None:
        about["num_input_tokens"] = config.num_input_tokens
    if load.output_lengths is None:
        about["num_tokens_to_generate"] = config.num_tokens_to_generate
    about |= differing(config.sampling) | {"seed": config.sampling.seed}
    about["num_warmups"] = config.num_warmups
    if load.sweep:
        about["verdict"] = verdict(result, load.slo_attainment, load.goodput)
    return about


def write(stage: StageRun, result: LoadTestResult, about: dict[str, Any]) -> None:
    """All files are volatile: they hold times."""
    with stage.open("requests.jsonl", volatile=True) as file:
        for number, one in enumerate(result.measurements):
            for record in one.records:
                line = {"measurement": number, **record.document()}
                file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
    summary = {
        "format_version": FORMAT_VERSION,
        "about": about,
        "highest_rate": result.highest_rate,
        "measurements": [one.document() for one in result.measurements],
    }
    stage.write_json("summary.json", summary, volatile=True)
    stage.write_text("report.html", report_page(result, about), volatile=True)


def shown(result: LoadTestResult) -> list[str]:
    """A table for the terminal, and the errors."""
    heads = ["requests sent", "done", "failed", "req/s", "out tok/s"]
    heads += ["TTFT p50", "p99", "TPOT p50", "p99", "E2EL p50", "p99"]
    rows: list[Sequence[str]] = [heads]
    for one in result.measurements:
        found = one.summary
        row = [one.name, str(found["num_completed"]), str(found["num_failed"])]
        for key in ("requests_per_second", "output_tokens_per_second"):
            row.append("" if found[key] is None else three(found[key]))
        for key in ("ttft", "tpot", "e2el"):
            for which in ("p50", "p99"):
                row.append("" if found[key] is None else milliseconds(found[key][which]))
        rows.append(row)
    lines = text_table([[cell.replace(NARROW, " ") for cell in row] for row in rows])
    for one in result.measurements:
        lines += [f"{one.name}: {n} failed: {error}" for error, n in one.summary["errors"].items()]
    return lines
