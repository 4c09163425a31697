"""A server of a small model in a process of its own, for benchmarks that are its clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.inference import SHAPES, their_model

SHAPE = "quick start"
END = "<|endoftext|>"
DOCS = Path(__file__).parents[1] / "docs"
LOOK_SECONDS = 0.1
END_SECONDS = 60


@contextmanager
def model_folder(load: str | None) -> Iterator[str]:
    """A checkpoint, or a folder with the quick start's shape, random weights, and a byte-level BPE
    of as many tokens that was trained on the documentation, so that outputs are texts."""
    if load is not None:
        yield load
        return
    with TemporaryDirectory() as folder:
        their_model(SHAPES[SHAPE], Path(folder))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SHAPES[SHAPE]["vocab_size"],
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train(sorted(map(str, DOCS.glob("*.md"))), trainer)
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(kind))
        yield folder


def pinned(cores: set[int], *arguments: str) -> list[str]:
    """The command of a stage on some cores, with one thread of torch."""
    cpus = ",".join(map(str, sorted(cores)))
    python = ["taskset", "--cpu-list", cpus, "env", "OMP_NUM_THREADS=1", sys.executable]
    return [*python, "-m", *arguments]


def run(command: list[str]) -> None:
    """Run a command to its end; RuntimeError, with what it printed, if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")


@contextmanager
def served(command: list[str]) -> Iterator[tuple[str, int]]:
    """The address of a server on a free port, and its process. RuntimeError, with what it logged,
    if it ends by itself or not with status 0."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen([*command, "--port", "0"], stdout=out, stderr=out)
        try:
            yield _address(process, log), process.pid
        finally:
            was_running = process.poll() is None
            process.terminate()
            status = process.wait(END_SECONDS)
        if not was_running or status:
            raise RuntimeError(f"the server ended with {status}:\n{log.read_text()[-4000:]}")


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"is served at (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()}")
