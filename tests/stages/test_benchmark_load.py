"""Load tests by the benchmark stage: a server on localhost, and the dynamic engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.benchmark.config import BenchmarkConfig
from stages.benchmark.run import run
from tests.stages.directly import run_directly, run_program
from tests.stages.html_page import check_sound
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.load_test.fake_server import FakeServer, fake_server
from trainyard.config import from_dict
from trainyard.errors import ConfigError, InfrastructureError
from trainyard.load_test.metrics import summarize
from trainyard.load_test.records import record_of
from trainyard.models.gpt.config import GPTConfig

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt(MODEL), step=50)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """In a thread of its own, since the stage has an event loop of its own."""
    ready, found = threading.Event(), []
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def work() -> None:
        async with fake_server() as one:
            found.append(one)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    assert ready.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(end.set)
    thread.join(20)
    loop.close()


def measured(out: Path, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    options = {"output_dir": str(out), "device": "cpu", "num_tokens_to_generate": 3} | options
    run_directly(BenchmarkConfig, run, **options)
    check_sound((out / "report.html").read_text())
    lines = (out / "requests.jsonl").read_text().splitlines()
    return json.loads((out / "summary.json").read_text()), [json.loads(line) for line in lines]


def test_a_server_is_measured_without_its_warm_up(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.bodies.clear()
    prompts = ["tokens:5:1", "busy:0:0"]
    summary, lines = measured(
        tmp_path,
        url=server.url,
        prompts=prompts,
        num_requests=6,
        num_warmups=2,
        concurrency=[1, 2],
        goodput=["e2el:20000"],
        ignore_eod=True,
    )
    assert len(server.bodies) == 2 + 2 * 6
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in server.bodies)
    assert {body["model"] for body in server.bodies} == {"tiny"}
    assert len(lines) == 12
    for number, (one, users) in enumerate(zip(summary["measurements"], (1, 2), strict=True)):
        assert one["concurrency"] == users >= one["max_concurrency"]
        assert one["errors"] == {"HTTP 429: too many requests": 3}
        assert (one["num_completed"], one["num_good"], one["output_tokens"]) == (3, 3, 9)
        # The lines give the figures again.
        records = [record_of(line) for line in lines if line["measurement"] == number]
        assert summarize(records)["ttft"] == one["ttft"]
        assert one["ttft"]["min"] >= 0.005
    printed = capsys.readouterr().out
    assert "2 at a time: 3 failed: HTTP 429: too many requests" in printed


@pytest.mark.slow
def test_a_sweep_finds_the_highest_rate(server: FakeServer, tmp_path: Path) -> None:
    # A request that takes 20 s misses, so no rate meets; one of 10 ms always meets.
    options = {"url": server.url, "sweep": True, "num_warmups": 0, "num_requests": 20}
    options |= {"goodput": ["e2el:10000"], "sweep_max_probes": 3, "request_rate": [50.0]}
    summary, _ = measured(tmp_path / "a", prompts=["tokens:0:0"], **options)
    assert [one["request_rate"] for one in summary["measurements"]] == [50, 100, 200]
    assert summary["highest_rate"] == 200
    assert "no higher one was measured" in summary["about"]["verdict"]
    few = options | {"num_requests": 3}
    summary, _ = measured(tmp_path / "c", prompts=["tokens:300:0"], **few)
    assert [one["request_rate"] for one in summary["measurements"]] == [50]
    assert "all 3 requests were under way at once" in summary["about"]["verdict"]
    few |= {"num_requests": None, "duration_seconds": 0.1}
    summary, _ = measured(tmp_path / "d", prompts=["tokens:300:0"], **few)
    assert len(summary["measurements"]) == 3, "a higher rate sends more in the same time"
    options["goodput"] = ["ttft:1"]
    summary, _ = measured(tmp_path / "b", prompts=["tokens:10:0"], **options)
    assert [one["request_rate"] for one in summary["measurements"]] == [50, 25, 12.5]
    assert summary["highest_rate"] is None


@pytest.mark.slow
def test_random_prompts_of_a_chat_are_texts(
    server: FakeServer, checkpoint: str, tmp_path: Path
) -> None:
    server.bodies.clear()
    measured(
        tmp_path,
        url=server.url,
        load=checkpoint,
        endpoint="chat",
        model="mine",
        input_lengths="uniform:3:9",
        num_tokens_to_generate=2,
        num_requests=3,
        request_rate=[100.0],
        num_warmups=0,
    )
    assert len(server.bodies) == 3
    assert all(isinstance(body["messages"][0]["content"], str) for body in server.bodies)
    assert {(body["model"], body["max_tokens"]) for body in server.bodies} == {("mine", 2)}


@pytest.mark.slow
def test_the_dynamic_engine_is_measured_by_the_same_code(checkpoint: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 20 * i, "input_length": 5 + i, "output_length": 4} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    summary, found = measured(
        tmp_path / "out",
        load=checkpoint,
        engine_type="dynamic",
        trace_file=str(trace),
        ignore_eod=True,
        inference_dynamic_batching_block_size=8,
        inference_dynamic_batching_buffer_size_gb=0.001,
    )
    (one,) = summary["measurements"]
    assert one["errors"] == {}
    assert one["prompt_tokens"] == 5 + 6 + 7 + 8
    assert one["output_tokens"] == 4 * 4
    assert all(line["scheduled_at"] <= line["sent_at"] < line["token_times"][0] for line in found)
    assert summary["about"]["blocks"] > 0


def test_all_requests_that_fail_fail_the_stage(server: FakeServer, tmp_path: Path) -> None:
    words = ["--url", server.url, "--prompts", "busy:0:0", "--num-warmups", "0"]
    done = run_program("stages.benchmark", *words, expect=3)
    assert "none of the requests was answered: HTTP 429: too many requests" in done.err
    with pytest.raises(InfrastructureError, match="does not answer"):
        run_directly(BenchmarkConfig, run, url="http://127.0.0.1:9", prompts=["a"])


def test_a_request_that_does_not_fit_is_counted(checkpoint: str, tmp_path: Path) -> None:
    options = {"load": checkpoint, "engine_type": "dynamic", "num_warmups": 0}
    summary, _ = measured(tmp_path, prompts=["a", "b" * 63], concurrency=[1], **options)
    (error,) = summary["measurements"][0]["errors"]
    assert "make 66" in error or "63" in error
    assert summary["measurements"][0]["num_completed"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": ["a"]}, "load is required .* or give --url"),
        ({"load": "x", "prompts": ["a"], "concurrency": [2]}, "--concurrency is of a load"),
        ({"url": "x", "prompts": ["a"]}, "--url 'x' is no address"),
        ({"url": "http://me:you@h", "prompts": ["a"]}, "OPENAI_API_KEY, not in the URL"),
        ({"url": "http://h", "prompts": ["a"], "bf16": True}, "--bf16 says how a model runs here"),
        ({"url": "http://h", "num_input_tokens": 4}, "tokens of a checkpoint's tokenizer"),
        ({"url": "http://h"}, "neither was given"),
        (
            {"url": "http://h", "prompts": ["a"], "concurrency": [1], "request_rate": [2.0]},
            "--concurrency and --request-rate are ways to send",
        ),
        ({"url": "http://h", "prompts": ["a"], "concurrency": [0]}, "--concurrency must be"),
        ({"url": "http://h", "prompts": ["a"], "request_rate": [-1.0]}, "--request-rate must"),
        ({"url": "http://h", "prompts": ["a"], "sweep": True}, "--sweep needs --goodput"),
        (
            {"url": "http://h", "prompts": ["a"], "goodput": ["ttft:1"], "slo_attainment": 0.5},
            "--slo-attainment is of --sweep",
        ),
        ({"url": "http://h", "trace_file": "a.csv"}, "must end with .jsonl"),
        ({"url": "http://h", "prompts": ["a"], "duration_seconds": 5.0}, "is of --request-rate"),
        ({"load": "x", "prompts": ["a"], "model": "m"}, "--model is of --url"),
        (
            {"load": "x", "engine_type": "dynamic", "prompts": ["a"], "stream": True},
            "--stream is of --engine-type static",
        ),
        (
            {"load": "x", "prompts": ["a"], "disable_prefix_caching": True},
            "--disable-prefix-caching is of --engine-type dynamic",
        ),
        (
            {"url": "http://h", "prompts": ["a"], "num_speculative_tokens": 2},
            "--num-speculative-tokens says how a model runs here",
        ),
        (
            {"load": "x", "prompts": ["a"], "inference_attention_backend": "flash"},
            "--inference-attention-backend is of --engine-type dynamic",
        ),
        (
            {"url": "http://h", "prompts": ["a"], "inference_attention_backend": "flash"},
            "--inference-attention-backend says how a model runs here",
        ),
        (
            {"url": "http://h", "load": "x", "input_lengths": "4", "num_input_tokens": 4},
            "--input-lengths and --num-input-tokens are two lengths",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(BenchmarkConfig, options)
