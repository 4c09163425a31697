"""Programs that the tests run as jobs of every place, and how a job is followed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flows.backends.base import StageJobRun
from flows.backends.outcome import Outcome
from tests.yard.faults import faults

FLOW_RUN = "0193e1f6-6f0c-7d4b-b0a5-1f2e3d4c5b6a"
"""Of a flow that is started twice."""

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}
TRAINING = {
    **MODEL,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 400,
    "save_interval": 50,
    "eval_interval": 1000,
    "eval_iters": 1,
    "log_interval": 10,
    "lr": 0.01,
    "split": "90,10,0",
    "num_threads": 1,
}
"""Options of stages `plan` and `pretrain`."""

SECONDS = 120
"""So long a test waits for what takes a second or two on a machine with nothing else to do."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

ALL_REDUCE = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} on {socket.gethostname()}: {total.item()}", flush=True)
dist.destroy_process_group()
"""
"""Of two ranks each says 3.0."""

SAY = """
def say(text):
    import os
    os.write(1, (text + "\\n").encode())
"""
"""A line in one piece: those of ranks, printed, would mix."""

COUNTING = f"""{SAY}
import json, os, signal, time
run = os.environ["TRAINYARD_RUN_DIR"]
def save(number, frame):
    report = dict(exit_status=128 + number, step=step, message="saved")
    report["class"] = "Stopped"
    json.dump(report, open(run + "/failure.json", "w"))
    say(f"saved step {{step}}")
    raise SystemExit(128 + number)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, save)
for step in range(STEPS):
    say(f"step {{step}}")
    time.sleep(SECONDS)
"""


def write_tokens(folder: Path) -> str:
    """Token files for TRAINING; their prefix."""
    return str(faults.write_tokens(folder / "tokens"))


def training(steps: int = 10_000, step_seconds: float = 0.25) -> str:
    """Counts steps; saves at SIGTERM and SIGUSR1."""
    return COUNTING.replace("STEPS", str(steps)).replace("SECONDS", str(step_seconds))


SAVES_SLOWLY = """
import os, signal, time
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
def cut_short(number, frame):
    print("cut short", flush=True)
    os._exit(1)
def save(number, frame):
    for one in SIGNALS:
        signal.signal(one, cut_short)
    print("saving", flush=True)
    time.sleep(6)
    print("all of it is saved", flush=True)
    os._exit(128 + number)
for one in SIGNALS:
    signal.signal(one, save)
print("begun", flush=True)
time.sleep(600)
"""
"""Takes its time, and a second signal ends that."""

AnyRun = TypeVar("AnyRun", bound=StageJobRun)
Started = TypeVar("Started", bound=StageJobRun, covariant=True)


class Block(Protocol[Started]):
    """A job that is still to be started."""

    async def trigger(self) -> Started:
        """Find or start it."""
        ...


def follow(
    block: Block[AnyRun], meanwhile: Callable[[AnyRun], Coroutine[Any, Any, None]] | None = None
) -> tuple[AnyRun, Outcome]:
    """Trigger, wait, and fetch; `meanwhile` runs during the wait."""

    async def whole() -> tuple[AnyRun, Outcome]:
        run = await block.trigger()
        async with asyncio.TaskGroup() as group:
            group.create_task(run.wait_for_completion())
            if meanwhile is not None:
                group.create_task(meanwhile(run))
        return run, await run.fetch_result()

    return asyncio.run(whole())


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; AssertionError after SECONDS."""
    faults.wait_for(condition, SECONDS)


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that gets SIGKILL when this is left, by an error too."""
    with process:
        try:
            yield process
        finally:
            process.kill()
