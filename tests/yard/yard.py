"""Whole flows as a person starts them, on a model of a few thousand weights."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]

FLOW_SECONDS = 600
HEADLINE = re.compile(
    r"^\d\d:\d\d:\d\d  (\S+) +(runs|done|reused|failed|stopped) *(.*)$", re.MULTILINE
)
NOTE = re.compile(r"[\d.]+ s +\S* *(.*)")

MODEL = """
[pretrain]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 32
position_embedding_type = "rope"
normalization = "RMSNorm"
swiglu = true
disable_bias_linear = true
untie_embeddings_and_output_weights = true
hidden_dropout = 0.0
attention_dropout = 0.0
micro_batch_size = 4
train_iters = 6
lr = 1e-3
split = "90,10,0"
eval_iters = 1
num_threads = 1

[reshard]
num_shards = 2

[evaluate]
task = "WIKITEXT103"

[benchmark]
prompts = ["The"]
num_tokens_to_generate = 4
"""

COLLECTED = f"""
[collect]
max_size_mb = 1.0
num_shards = 2

[train_tokenizer]
vocab_size = 500
{MODEL}"""

SENTENCE = "the yard shunts every train of words onto its own track before dawn breaks"


@dataclass
class Ended:
    """A flow that has ended."""

    status: int
    out: str
    err: str
    seconds: float

    def states(self) -> dict[str, str]:
        """Last state of each stage that was begun."""
        return {job: state for job, state, _ in HEADLINE.findall(self.err)}

    def notes(self) -> dict[str, str]:
        """Why each stage ran that did, or what kind of failure it met."""
        ends = [(job, rest) for job, state, rest in HEADLINE.findall(self.err) if state != "runs"]
        return {job: found[1] for job, rest in ends if (found := NOTE.match(rest))}


@dataclass
class Yard:
    """A folder for artifacts, and the flows that work in it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    working_directory: Path = ROOT

    @property
    def tiny(self) -> Path:
        """The root of what recipe `tiny` makes."""
        return self.folder / "yard" / "tiny"

    def recipe(self, text: str) -> str:
        """Write recipe `tiny`; its path."""
        path = self.folder / "tiny.toml"
        path.write_text(text)
        return str(path)

    def start(
        self, *arguments: str, stderr: int | IO[str] = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a Python program, as after the word `python`, in a process group of its own."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        environment |= {"YARD": str(self.folder / "yard"), **self.environment}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.working_directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> Ended:
        """Run a Python program to its end."""
        began = time.monotonic()
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=FLOW_SECONDS)
        return Ended(process.returncode, out, err, time.monotonic() - began)

    def pretrain(self, recipe: str, *options: str) -> Ended:
        """Run the flow on a recipe."""
        return self.run("-m", "flows.pretrain_gpt", recipe, *options)

    def processes(self) -> list[str]:
        """Command lines of all living processes that were started for this yard."""
        return list(self.by_process().values())

    def by_process(self) -> dict[int, str]:
        """The same by their process ids."""
        mark = f"YARD={self.folder / 'yard'}\0".encode()
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (place / "environ").read_bytes():
                    line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(place.name)] = line
            except OSError:
                continue
        return {pid: line for pid, line in found.items() if line}

    def wait_until_empty(self, seconds: float) -> list[str]:
        """What still runs for this yard when nothing does, or the time is over."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.processes()


def write_corpus(file: Path, count: int, seed: int) -> None:
    """Documents of our own: random sentences."""
    draw = random.Random(seed)
    lines = [
        json.dumps({"text": " ".join(draw.choices(SENTENCE.split(), k=draw.randint(20, 60))) + "."})
        for _ in range(count)
    ]
    file.write_text("\n".join(lines) + "\n")
    os.utime(file, (1e9, 1e9))  # settled: its digest is remembered
