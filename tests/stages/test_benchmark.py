"""The benchmark stage: generations are reproducible, measurements add up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stages.benchmark import static
from stages.benchmark.config import BenchmarkConfig
from stages.benchmark.run import run
from tests.stages.directly import run_directly, run_program
from tests.trainyard.checkpoint import samples
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.charts.numbers import milliseconds
from trainyard.config import from_dict, to_dict
from trainyard.errors import ConfigError
from trainyard.inference.decoders import Decoder
from trainyard.inference.measure import request_timing, throughput
from trainyard.inference.request import Request
from trainyard.inference.static import run_requests
from trainyard.inference.texts import build_decoder
from trainyard.models.gpt.config import GPTConfig

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=64)
TEXTS = ("the yard", "a", "trains of words")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt(MODEL), step=50)
    return folder


def benchmark(checkpoint: str, out: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {"num_warmups": 0, "device": "cpu"} | options
    run_directly(BenchmarkConfig, run, load=checkpoint, output_dir=str(out), **options)
    documents = [json.loads((out / f"{n}.json").read_text()) for n in ("generations", "timings")]
    return documents[0], documents[1]


def test_prompts_are_continued_and_timed(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generations, timings = benchmark(
        checkpoint, tmp_path, prompts=list(TEXTS), num_tokens_to_generate=6, ignore_eod=True
    )
    assert generations["step"] == 50
    for text, request, timing in zip(
        TEXTS, generations["requests"], timings["requests"], strict=True
    ):
        assert request["prompt"] == text
        assert len(request["prompt_tokens"]) == timing["num_input_tokens"] == len(text)
        assert len(request["generated_tokens"]) == timing["num_output_tokens"] == 6
        assert request["finish_reason"] == "length"
        assert max(request["generated_tokens"]) < 257
        assert timing["latency"] == pytest.approx(sum(timing["tpot"]))
        assert timing["latency_per_output_token"] == pytest.approx(timing["latency"] / 6)
        assert timing["memory_usage_GB"] > 0
    total = sum(timing["latency"] for timing in timings["requests"])
    assert timings["latency_per_output_token"] == pytest.approx(total / 18)
    assert timings["tokens_per_second"] == pytest.approx(18 / timings["seconds"])
    assert timings["kv_cache_bytes"] == 2 * 2 * 3 * 2 * (15 + 6) * 16 * 4
    printed = capsys.readouterr().out
    assert " \n------------- RESULT FOR PROMPT 2 --------------- \n" in printed
    assert "output tokens / second" in printed


def test_keys_of_8_bits_take_a_quarter_of_those_of_fp32(checkpoint: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompts": list(TEXTS), "num_tokens_to_generate": 6}
    _, timings = benchmark(checkpoint, tmp_path, **options, kv_cache_dtype="fp8")
    assert timings["kv_cache_bytes"] == 2 * 2 * 3 * 2 * (15 + 6) * 16
    with pytest.raises(ConfigError, match="--kv-cache-dtype says how a model runs here"):
        from_dict(BenchmarkConfig, {"url": "http://x", "prompts": ["a"], "kv_cache_dtype": "fp8"})


@pytest.mark.slow
def test_weights_of_8_bits_round_the_texts_of_the_static_engine(
    checkpoint: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"prompts": list(TEXTS), "return_log_probs": True}
    whole, near = (
        benchmark(checkpoint, tmp_path, **options, inference_weight_dtype=kind)[0]["requests"]
        for kind in (None, "int8")
    )
    for one, other in zip(near, whole, strict=True):
        assert one["log_probs"] != other["log_probs"]
        assert one["log_probs"][0] == pytest.approx(other["log_probs"][0], abs=0.1)


@pytest.mark.slow
def test_generations_do_not_depend_on_the_batch(checkpoint: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompts": list(TEXTS), "top_k": 0, "temperature": 0.9}
    benchmark(checkpoint, tmp_path / "a", **options)
    options |= {"inference_max_requests": 1, "inference_repeat_n": 2, "num_warmups": 1}
    _, timings = benchmark(checkpoint, tmp_path / "b", **options)
    assert len(timings["requests"]) == 6
    together, apart = ((tmp_path / n / "generations.json").read_bytes() for n in ("a", "b"))
    assert together == apart


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Size of each decoder that is built, and whether it would be compiled; none is."""
    found: list[tuple[int, bool]] = []

    def build(*given: Any, compiled: bool, **options: Any) -> Decoder:
        found.append((given[1], compiled))
        return build_decoder(*given, **options)

    monkeypatch.setattr(static, "build_decoder", build)
    return found


@pytest.mark.slow
def test_one_step_is_compiled_for_batches_of_all_sizes(
    checkpoint: str, tmp_path: Path, built: list[tuple[int, bool]]
) -> None:
    options: dict[str, Any] = {"prompts": list(TEXTS), "top_k": 0, "temperature": 0.9}
    options |= {"inference_max_requests": 2, "inference_repeat_n": 2, "return_log_probs": True}
    benchmark(checkpoint, tmp_path / "plain", **options)
    assert built == [(2, False), (1, False)]
    built.clear()
    benchmark(checkpoint, tmp_path / "compiled", **options, cuda_graph_impl="local")
    assert built == [(2, True)]
    plain, compiled = (tmp_path / n / "generations.json" for n in ("plain", "compiled"))
    ours, theirs = (json.loads(path.read_text())["requests"] for path in (compiled, plain))
    for request, expected in zip(ours, theirs, strict=True):
        for key in ("log_probs", "prompt_log_probs"):
            assert request.pop(key) == pytest.approx(expected.pop(key), abs=1e-4)
        assert request == expected


def test_the_compilers_copy_of_the_weights_has_to_fit_too(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.parallel.device.memory_bytes", lambda: 200_000)
    options = {"prompts": ["a"], "num_tokens_to_generate": 1}
    benchmark(checkpoint, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match=r"copy of them take .* give --cuda-graph-impl none"):
        benchmark(checkpoint, tmp_path / "out", **options, cuda_graph_impl="local")


def test_random_prompts_have_no_special_token(checkpoint: str, tmp_path: Path) -> None:
    options = {"num_input_tokens": 40, "inference_max_requests": 5, "num_tokens_to_generate": 2}
    generations, _ = benchmark(checkpoint, tmp_path, **options)
    prompts = [request["prompt_tokens"] for request in generations["requests"]]
    assert [len(prompt) for prompt in prompts] == [40] * 5
    assert all(0 < token < 257 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_a_prompt_that_is_too_long_is_refused_before_any_output(
    checkpoint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the model has 64 positions"):
        benchmark(checkpoint, tmp_path / "out", prompts=["x" * 60])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "--prompts .* and --num-input-tokens .* neither was given"),
        ({"prompts": ["a"], "num_input_tokens": 3}, "both were given"),
        ({"prompts": ["a", ""]}, "--prompts contains an empty text"),
        ({"num_input_tokens": 0}, "--num-input-tokens must be at least 1"),
        ({"prompts": ["a"], "num_tokens_to_generate": 0}, "--num-tokens-to-generate"),
        ({"prompts": ["a"], "num_warmups": -1}, "--num-warmups"),
        ({"prompts": ["a"], "top_p": 0.9}, "--top-k 1 and --top-p 0.9"),
        ({"prompts": ["a"], "beam_width": 2}, "--beam-width is for stages.generate"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_dict(BenchmarkConfig, {"load": "x", **options})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 10**15}, r"config\.json: .*--hidden-size must be at most 2147483647, got"),
        ({"num_layers": 4000}, "says 4000 layers, and there are 28 tensors"),
        ({"hidden_size": 2**22}, "final_layernorm.weight is .32., wanted .4194304."),
        ({"ffn_hidden_size": 2**30}, r"linear_fc1.weight is .128, 32., wanted .1073741824, 32."),
    ],
)
def test_a_model_other_than_that_of_the_tensors_is_refused_before_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(samples, "to_dict", lambda config: {**to_dict(config), **changes})
    save_gpt(str(tmp_path / "run"), random_gpt(MODEL))
    line = ["--load", str(tmp_path / "run"), "--prompts", "a", "--device", "cpu"]
    done = run_program("stages.benchmark", *line, expect=1)
    assert re.search(words, done.err), done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_input_tokens": 10**15}, "--num-input-tokens 1000000000000000 and --num-tokens"),
        (
            {"num_input_tokens": 5, "inference_max_requests": 10**12},
            "--inference-max-requests 1000000000000: the cache .* takes .* GiB, and this "
            "machine has .* GiB of memory; generate for fewer",
        ),
    ],
)
def test_prompts_that_exceed_the_memory_are_refused(
    checkpoint: str, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        benchmark(checkpoint, tmp_path / "out", **options)


def test_a_model_larger_than_the_memory_is_refused(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.parallel.device.memory_bytes", lambda: 2**16)
    words = r"its 39,\d{3} parameters take on each rank about 0.0 GiB, and this machine has"
    with pytest.raises(ConfigError, match=words):
        benchmark(checkpoint, tmp_path / "out", prompts=["a"])


def test_numbers_of_16_bits_halve_the_cache(checkpoint: str, tmp_path: Path) -> None:
    options = {"prompts": ["the yard"], "num_tokens_to_generate": 4, "ignore_eod": True}
    full = benchmark(checkpoint, tmp_path / "fp32", **options)[1]
    for name in ("bf16", "fp16"):
        half = benchmark(checkpoint, tmp_path / name, **options, **{name: True})[1]
        assert half["kv_cache_bytes"] * 2 == full["kv_cache_bytes"]
    with pytest.raises(ConfigError, match="give --bf16 or --fp16, not both"):
        from_dict(BenchmarkConfig, {"load": "c", **options, "bf16": True, "fp16": True})


def test_log_probabilities_and_stop_words_are_those_of_generation(
    checkpoint: str, tmp_path: Path
) -> None:
    options = {"prompts": list(TEXTS), "num_tokens_to_generate": 6, "ignore_eod": True}
    free = benchmark(checkpoint, tmp_path / "a", **options, return_log_probs=True)[0]
    for request in free["requests"]:
        assert len(request["log_probs"]) == 6
        assert len(request["prompt_log_probs"]) == len(request["prompt_tokens"]) - 1
    word = free["requests"][0]["generated_output"][1:3]
    ended = benchmark(checkpoint, tmp_path / "b", **options, stop_words=[word])[0]
    assert ended["requests"][0]["finish_reason"] == "stop"
    assert word not in ended["requests"][0]["generated_output"]


def test_a_stream_shows_the_text_of_the_first_prompt_as_it_comes(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"num_tokens_to_generate": 6, "ignore_eod": True, "stream": True}
    (tmp_path / "p.txt").write_text("the yard\n")
    file = str(tmp_path / "p.txt")
    generations, _ = benchmark(checkpoint, tmp_path / "o", prompt_file=file, **options)
    text = generations["requests"][0]["generated_output"].rstrip("\ufffd")
    assert f"\nprompt 0: {text}" in capsys.readouterr().out


def test_the_page_has_the_figures_and_the_requests(checkpoint: str, tmp_path: Path) -> None:
    _, timings = benchmark(checkpoint, tmp_path, prompts=["<b>the yard"], ignore_eod=True)
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;the yard" in page
    assert milliseconds(timings["end_to_end_latency"]["mean"]) in page
    assert page.count("<svg") == 2, "a chart and its curves"


def test_latencies_have_the_definitions_of_the_field() -> None:
    requests = [request_timing(0, 4, [0.5, 0.1, 0.3], 0), request_timing(1, 4, [0.5], 0)]
    found = throughput(requests, [1.0])
    assert found["time_to_first_token"]["mean"] == 0.5
    assert found["end_to_end_latency"]["mean"] == pytest.approx((0.9 + 0.5) / 2)
    assert found["time_per_output_token"]["mean"] == pytest.approx(0.2), "one token has none"
    assert found["inter_token_latency"]["p99"] == 0.3
    assert found["latency_per_output_token"] == pytest.approx(1.4 / 4)
    assert found["tokens_per_second"] == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_model_on_two_ranks_generates_the_same(checkpoint: str, tmp_path: Path) -> None:
    options = {"prompts": list(TEXTS), "num_tokens_to_generate": 4}
    expected, _ = benchmark(checkpoint, tmp_path / "one", **options)
    line = ["--load", checkpoint, "--prompts", *TEXTS, "--num-tokens-to-generate", "4"]
    line += ["--num-warmups", "0", "--device", "cpu", "--output-dir", str(tmp_path / "two")]
    line += ["--nproc-per-node", "2"]
    run_program("stages.benchmark", *line, "--tensor-model-parallel-size", "2", expect=0)
    assert json.loads((tmp_path / "two" / "generations.json").read_text()) == expected


def test_a_benchmark_runs_one_copy_of_a_model(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is 2, and the number of ranks 1: a benchmark runs one"):
        benchmark(checkpoint, tmp_path, prompts=["a"], tensor_model_parallel_size=2)


def test_a_profile_is_of_cuda(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--benchmark-profile is of CUDA, and the device is cpu"):
        benchmark(checkpoint, tmp_path, prompts=["a"], benchmark_profile=True)


def test_a_profile_is_of_the_timed_repetitions(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    @contextmanager
    def profiled(*given: object) -> Iterator[None]:
        begun.append("profile")
        yield
        begun.append("end")

    def run_noted(decoder: Decoder, requests: Sequence[Request], **options: Any) -> Any:
        begun.append(f"{requests[0].max_tokens} tokens")
        return run_requests(decoder, requests, **options)

    monkeypatch.setattr(static, "profiled", profiled)
    monkeypatch.setattr(static, "run_requests", run_noted)
    options = {"num_warmups": 1, "num_tokens_to_generate": 12, "inference_repeat_n": 2}
    benchmark(checkpoint, tmp_path, prompts=["a"], **options)
    assert begun == ["10 tokens", "profile", "12 tokens", "12 tokens", "end"]


def test_a_longest_sequence_refuses_longer_prompts(checkpoint: str, tmp_path: Path) -> None:
    short = {"num_tokens_to_generate": 4, "inference_max_seq_length": 11}
    with pytest.raises(ConfigError, match=r"length 11: 8 tokens of a prompt .* 4 make 12"):
        benchmark(checkpoint, tmp_path, prompts=["the yard"], **short)
    with pytest.raises(ConfigError, match="length 11: 9 tokens"):
        from_dict(BenchmarkConfig, {"load": "c", "num_input_tokens": 9, **short})


def test_a_model_that_the_command_line_does_not_expect_is_refused(checkpoint: str) -> None:
    words = ("--load", checkpoint, "--prompts", "a", "--num-tokens-to-generate", "1")
    same = ("--num-layers", "2", "--hidden-size", "32", "--max-position-embeddings", "64")
    assert run_program("stages.benchmark", *words, *same).status == 0
    done = run_program("stages.benchmark", *words, "--num-layers", "24", "--swiglu", expect=2)
    assert "its --num-layers is 2, not 24; its --swiglu is false, not true" in done.err
