"""The figures of a load test beside those of AIPerf, on the same server and prompts.

    python -m benchmarks.load_test --aiperf ENVIRONMENT/bin/aiperf
    python -m benchmarks.load_test --aiperf ENVIRONMENT/bin/aiperf --url http://127.0.0.1:5000

AIPerf wants an environment of its own (`pip install aiperf`). Without --url, a server of this
program answers with tokens at set times, so that a difference is one of the two clients. Both keep
the same number of requests under way, in turn, several times; the medians of the runs are compared.
AIPerf's "inter token latency" is the time per output token here, its "request latency" the
end-to-end latency; both take the numbers of tokens from the server."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import web

from benchmarks.corpus import report

WITHIN = 0.02
"""Largest difference, in parts of AIPerf's figure."""

FIRST_SECONDS, GAP_SECONDS = 1.0, 0.05
TOKENS = 32

FIGURES: dict[str, tuple[str, str, float]] = {
    "TTFT": ("time_to_first_token", "ttft", 1e3),
    "TPOT": ("inter_token_latency", "tpot", 1e3),
    "end-to-end latency": ("request_latency", "e2el", 1e3),
    "requests/s": ("request_throughput", "requests_per_second", 1.0),
    "output tokens/s": ("output_token_throughput", "output_tokens_per_second", 1.0),
}
"""AIPerf's name, ours, and its unit in ours."""

VOCABULARY = {"[UNK]": 0, "a": 1}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"},
}
"""AIPerf loads a tokenizer even where the server counts tokens."""


# --- the server -------------------------------------------------------------------------------


async def answer(request: web.Request) -> web.StreamResponse:
    """A token after FIRST_SECONDS, the others every GAP_SECONDS."""
    body = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    at = loop.time() + FIRST_SECONDS
    for number in range(body["max_tokens"]):
        await asyncio.sleep(max(at - loop.time(), 0))
        at += GAP_SECONDS
        is_last = number + 1 == body["max_tokens"]
        choice = {"index": 0, "text": "a ", "finish_reason": "length" if is_last else None}
        await send(response, {"object": "text_completion", "choices": [choice]})
    usage = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
    usage["total_tokens"] = sum(usage.values())
    await send(response, {"object": "text_completion", "choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


async def send(response: web.StreamResponse, document: dict[str, Any]) -> None:
    """An event of the stream."""
    await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")


async def models(request: web.Request) -> web.Response:
    """The one model."""
    return web.json_response({"object": "list", "data": [{"id": "timed", "object": "model"}]})


@contextmanager
def timed_server() -> Iterator[str]:
    """Its address."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []
    end = asyncio.Event()

    async def work() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await end.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),), daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)


# --- the two clients --------------------------------------------------------------------------


def ours(url: str, prompts: Path, out: Path, users: int, count: int) -> dict[str, float]:
    """Our figures."""
    words = ["--url", url, "--prompt-file", str(prompts), "--concurrency", str(users)]
    words += ["--num-requests", str(count), "--num-warmups", "2", "--ignore-eod", "--force"]
    words += ["--num-tokens-to-generate", str(TOKENS), "--output-dir", str(out)]
    run([sys.executable, "-m", "stages.benchmark", *words])
    (one,) = json.loads((out / "summary.json").read_text())["measurements"]
    assert one["num_failed"] == 0, one["errors"]
    return {
        name: one[key]["mean"] if isinstance(one[key], dict) else one[key]
        for name, (_, key, _) in FIGURES.items()
    }


def theirs(
    program: str, url: str, model: str, prompts: Path, out: Path, users: int, count: int
) -> dict[str, float]:
    """AIPerf's figures, in our units."""
    tokenizer = out / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(kind))
    words = ["--model", model, "--url", url, "--endpoint-type", "completions", "--streaming"]
    words += ["--input-file", str(prompts), "--custom-dataset-type", "single_turn"]
    words += ["--concurrency", str(users), "--request-count", str(count)]
    words += ["--warmup-request-count", "2", "--use-server-token-count"]
    for key, value in (("max_tokens", TOKENS), ("temperature", 0), ("ignore_eos", "true")):
        words += ["--extra-inputs", f"{key}:{value}"]
    words += ["--tokenizer", str(tokenizer), "--output-artifact-dir", str(out), "--ui", "none"]
    run([program, "profile", *words])
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return {name: found[key]["avg"] / unit for name, (key, _, unit) in FIGURES.items()}


def run(command: list[str]) -> None:
    """RuntimeError, with what it printed, if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")


def compare(program: str, url: str, model: str, users: int, count: int, runs: int) -> None:
    """A row for each figure."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"text": f"a text to continue, number {i}"}) for i in range(count)]
        prompts.write_text("\n".join(lines) + "\n")
        for number in range(runs):
            out = Path(folder) / f"theirs-{number}"
            found["theirs"].append(theirs(program, url, model, prompts, out, users, count))
            out = Path(folder) / f"ours-{number}"
            found["ours"].append(ours(url, prompts, out, users, count))
    for name in FIGURES:
        mine, peer = (statistics.median(r[name] for r in found[who]) for who in ("ours", "theirs"))
        difference = abs(mine / peer - 1)
        report(
            name,
            f"{mine:.5g}; AIPerf {peer:.5g}: {100 * (mine / peer - 1):+.2f} %",
            f"{100 * WITHIN:.0f} %",
            difference <= WITHIN,
        )


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf", required=True, help="AIPerf's program")
    parser.add_argument("--url", help="of a server; unset: one that answers at set times")
    parser.add_argument("--model", default="timed", help="name of the model of --url")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    with timed_server() if given.url is None else nullcontext(given.url) as url:
        compare(given.aiperf, url, given.model, given.concurrency, given.requests, given.runs)


if __name__ == "__main__":
    main()
