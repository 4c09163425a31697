"""The server as people start it: a process, real clients, signals, ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import torch

from stages.generate.config import GenerateConfig
from stages.generate.run import run
from stages.serve.config import ServeConfig
from stages.serve.engine import build
from tests.stages.directly import run_directly, run_program
from tests.stages.test_generate import HYBRID
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.inference.small_models import build as small_model
from tests.trainyard.serving.running import loaded_of, running
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.inference.dynamic.build import build_engine
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.load import load_on_ranks
from trainyard.models.gpt.config import GPTConfig
from trainyard.serving.batch_engine import BatchEngine

MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=64)
TEXT = "the yard"
MAMBA_SPEC = ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt(MODEL))
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What stages.generate writes for the prompt, greedily."""
    return generated(checkpoint, tmp_path_factory.mktemp("out"))


def generated(checkpoint: str, out: Path) -> str:
    options: dict[str, Any] = {"prompts": [TEXT], "num_tokens_to_generate": 8, "device": "cpu"}
    run_directly(GenerateConfig, run, load=checkpoint, output_dir=str(out), **options)
    text: str = json.loads((out / "generations.jsonl").read_text())["generated_text"]
    return text


class Served:
    """A process of stages.serve that answers."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def greedy(self) -> str:
        """The text for the prompt."""
        body = {"prompts": [TEXT], "tokens_to_generate": 8, "top_k": 1}
        reply = httpx.put(f"{self.url}/api", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["text"][0]
        return text

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def served(*words: str, module: tuple[str, ...] = ("stages.serve",)) -> Iterator[Served]:
    command = [sys.executable, "-m", *module, *words, "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stderr is not None
            yield Served(process, address_in(process.stderr))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def address_in(stream: IO[str]) -> str:
    """The address that a server logs; what it logs later is read and dropped."""
    lines = []
    for line in stream:
        lines.append(line)
        if found := re.search(r"is served at (http://\S+)", line):
            threading.Thread(target=stream.read, daemon=True).start()
            return found[1]
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def server(checkpoint: str) -> Iterator[Served]:
    """By Megatron-LM's own command, its options of the model included."""
    program = ("stages.megatron", "tools/run_text_generation_server.py")
    model = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"]
    more = ["--micro-batch-size", "1", "--seed", "42", "--top_k", "0", "--temperature", "0.7"]
    with served("--load", checkpoint, *model, *more, module=program) as found:
        yield found


@pytest.mark.slow
def test_megatrons_command_serves_what_generate_writes(server: Served, expected: str) -> None:
    assert server.greedy() == TEXT + expected


@pytest.mark.slow
def test_the_server_of_mambas_serves_what_generate_writes(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(HYBRID))
    program = ("stages.megatron", "tools/run_mamba_text_generation_server.py")
    model = ["--num-layers", "3", "--hybrid-layer-pattern", "M*-", "--spec", *MAMBA_SPEC]
    with served("--load", str(tmp_path / "run"), *model, module=program) as found:
        assert found.greedy() == TEXT + generated(str(tmp_path / "run"), tmp_path)


@pytest.mark.slow
def test_curl_as_in_megatrons_readme(server: Served) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl is installed")
    command = [curl, "-sS", f"{server.url}/api", "-X", "PUT"]
    command += ["-H", "Content-Type: application/json; charset=UTF-8"]
    command += ["-d", '{"prompts":["Hello world"], "tokens_to_generate":1}']
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["text"][0].startswith("Hello world")


@pytest.mark.slow
def test_the_interactive_client_shows_answers_and_errors(server: Served, expected: str) -> None:
    typed = f"{TEXT}\n8\n{TEXT}\nmany\n{TEXT}\n999\n"
    host = server.url.removeprefix("http://")
    module = ("stages.megatron", "tools/text_generation_cli.py")
    done = subprocess.run(
        [sys.executable, "-m", *module, host],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"Megatron Response: \n{TEXT}" in done.stdout
    assert "'many' is no number of tokens" in done.stdout
    assert "Error 400: prompt 0 has 8 tokens and 999 are to be generated" in done.stdout


@pytest.mark.slow
def test_sigterm_lets_a_stream_finish_and_ends_with_0(checkpoint: str) -> None:
    import openai  # a second, which unit tests need not pay

    with served("--load", checkpoint) as found:
        client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
        name = client.models.list().data[0].id
        more = {"ignore_eos": True}
        stream = client.completions.create(
            model=name, prompt="a", max_tokens=50, n=20, stream=True, extra_body=more
        )
        next(iter(stream))
        found.process.send_signal(signal.SIGTERM)
        reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
        assert reasons.count("length") == 20
        assert found.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_ranks_serve_the_same_text_and_end_together(
    checkpoint: str, expected: str, layout: str
) -> None:
    words = ("--load", checkpoint, "--nproc-per-node", "2")
    with served(*words, f"--{layout}-model-parallel-size", "2") as found:
        assert found.greedy() == TEXT + expected
        assert found.end() == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_server(checkpoint: str) -> None:
    words = ("--nproc-per-node", "2", "--tensor-model-parallel-size", "2")
    with served("--load", checkpoint, *words) as found:
        ranks = children(found.process.pid)
        follower = next(pid for pid in ranks if b"RANK=1" in _environment(pid))
        os.kill(follower, signal.SIGKILL)
        assert found.process.wait(60) == 3


@pytest.mark.slow
def test_texts_over_the_border_of_the_process_are_those_within_one(
    checkpoint: str, server: Served
) -> None:
    """Sampled, with stop words and scores, several at once: to the last bit of a probability."""
    generator = load_on_ranks(checkpoint, torch.device("cpu"))
    fields: dict[str, Any] = {"prompt": ["the yard", "a", "signal"], "max_tokens": 12, "seed": 5}
    fields |= {"n": 2, "best_of": 3, "logprobs": 3, "echo": True, "stop": ["q", "zz"], "top_k": 40}
    fields["temperature"] = 1.0
    with running(generator, engine=build_engine(generator, DynamicConfig())) as here:
        expected = here.post("/v1/completions", **fields).json()
        beams = here.put(prompts=["the yard"], beam_width=3, tokens_to_generate=4).json()
    found = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60).json()
    assert found["choices"] == expected["choices"]
    assert found["usage"] == expected["usage"]
    body = {"prompts": ["the yard"], "beam_width": 3, "tokens_to_generate": 4}
    assert httpx.put(f"{server.url}/api", json=body, timeout=60).json() == beams


def test_the_process_that_listens_loads_no_torch() -> None:
    code = "import sys, stages.serve.run; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@contextmanager
def streaming(server: Served) -> Iterator[Iterator[str]]:
    """The lines of a long answer that has begun."""
    body = {"prompt": "a", "max_tokens": 60, "n": 20, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        yield lines


@pytest.mark.slow
def test_a_killed_engine_ends_every_request_and_the_server_at_once(checkpoint: str) -> None:
    with served("--load", checkpoint) as found, streaming(found) as lines:
        (engine,) = children(found.process.pid)
        os.kill(engine, signal.SIGKILL)
        began = time.monotonic()
        assert "its process was killed by SIGKILL" in list(lines)[-1]
        assert found.process.wait(60) == 3
        assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine(checkpoint: str) -> None:
    with served("--load", checkpoint) as found, streaming(found) as lines:
        (engine,) = children(found.process.pid)
        os.kill(found.process.pid, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        deadline = time.monotonic() + 10
        while is_running(engine):
            assert time.monotonic() < deadline, "the engine lives on"
            time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize(
    ("kind", "expected"), [("gpt", DynamicEngine), ("hybrid", DynamicEngine), ("t5", BatchEngine)]
)
def test_each_family_runs_on_the_engine_that_can(kind: str, expected: type) -> None:
    options = {"load": "x", "inference_dynamic_batching_max_requests": 2}
    engine = build(from_dict(ServeConfig, options), loaded_of(small_model(kind)))
    assert isinstance(engine, expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("inference_weight_dtype", "int8"),
        ("kv_cache_dtype", "fp8"),
        ("inference_attention_backend", "flash"),
    ],
)
def test_8_bits_and_flash_attn_are_for_the_dynamic_engine(name: str, kind: str) -> None:
    config = from_dict(ServeConfig, {"load": "x", name: kind})
    with pytest.raises(ConfigError, match=f"{kind} is not for a t5"):
        build(config, loaded_of(small_model("t5")))


# --- refusals ---------------------------------------------------------------------------------


def test_an_open_address_without_a_key_is_refused_before_any_work(checkpoint: str) -> None:
    done = run_program("stages.serve", "--load", checkpoint, "--host", "0.0.0.0", expect=2)
    assert "there is no key; give one in the variable TRAINYARD_API_KEY" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bf16": True, "fp16": True}, "not both"),
        ({"inference_max_seq_length": 0}, "--inference-max-seq-length"),
        ({"served_model_name": "a\x1b"}, "--served-model-name"),
        ({"port": -1}, "--port"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(ServeConfig, {"load": "x", **options})


def test_more_ranks_than_a_model_takes_are_refused() -> None:
    config = from_dict(ServeConfig, {"load": "x", "tensor_model_parallel_size": 2})
    config.check_ranks(2)
    with pytest.raises(ConfigError, match=r"4 ranks: .* take 2"):
        config.check_ranks(4)


@pytest.mark.parametrize("word", ["localhost:5000:1", "a b", "ftp://a", "host:5000/other"])
def test_the_client_takes_an_address_alone(word: str) -> None:
    done = run_program("stages.generate", word, expect=2)
    assert "HOST:PORT" in done.err


def test_the_client_says_that_nobody_answers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda text: "1")
        done = run_program("stages.generate", "127.0.0.1:1", expect=3)
    assert "http://127.0.0.1:1/api does not answer" in done.err


@pytest.mark.slow
def test_a_model_that_the_engine_cannot_load_is_refused_before_the_server_answers(
    checkpoint: str,
) -> None:
    words = ("--load", checkpoint, "--inference-dynamic-batching-num-cuda-graphs", "4")
    words += ("--port", "0", "--device", "cuda")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_program("stages.serve", *words, expect=2)
    assert "--device cuda" in done.err
    assert "is served at" not in done.err
