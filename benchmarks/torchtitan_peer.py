"""torchtitan's trainer on one GPU, a peer of `benchmarks.train`.

    pip install torchtitan==0.2.2
    python -m benchmarks.torchtitan_peer llama-8b-half

Its own model, compiled, with its own mixed precision, optimizer and loop, as its command line gives
them for one GPU; no recomputation, as in ours; random tokens instead of a dataset. The rate is the
one that it logs for the steps after the first ten. Prints one JSON line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import SHAPES, Shape, share_of_peak

STEPS, WARMUP, EVERY = 30, 10, 5
RATE = re.compile(r"step: *(\d+).*?tps: *([\d,]+)")
NAME = "timed"
"""Of the model and its only flavor, in torchtitan's registry."""


class RandomTokens:
    """Batches of the form that its loaders give: on the CPU, labels beside inputs."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1)
        size = (self._shape.mbs, self._shape.seq + 1)
        while True:
            tokens = torch.randint(self._shape.vocab, size, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignored."""


class Rates(logging.Handler):
    """Tokens per second of the steps after the first ones, as logged, and the peak of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []
        self.peak_bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        """One log line."""
        line = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        found = RATE.search(line)
        if found and int(found[1]) > WARMUP:
            # Here, as torchtitan resets torch's peak after each line.
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
            self.found.append(float(found[2].replace(",", "")))


def register(shape: Shape) -> None:
    """Its Llama 3 in another size, with tokens that are made up."""
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    sizes = TransformerModelArgs(
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        ffn_dim_multiplier=1.3,
        multiple_of=1024,
        rope_theta=500000,
    )
    spec = replace(
        get_train_spec(),
        model_args={NAME: sizes},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: RandomTokens(shape),
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)


def measure(shape: Shape, extra: list[str]) -> dict[str, float]:
    """One training. extra: further options of its command line."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger, logger
    from torchtitan.train import Trainer

    init_logger()
    register(shape)
    options = {
        "job.dump-folder": tempfile.mkdtemp(prefix="torchtitan-"),
        "model.name": NAME,
        "model.flavor": NAME,
        "training.local-batch-size": shape.mbs,
        "training.seq-len": shape.seq,
        "training.steps": STEPS,
        "activation-checkpoint.mode": "none",
        "metrics.log-freq": EVERY,
        "lr-scheduler.warmup-steps": 2,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    trainer = Trainer(ConfigManager().parse_args([*words, "--compile.enable", *extra]))
    rates = Rates()
    logger.addHandler(rates)
    trainer.train()
    rate = statistics.median(rates.found)
    return {
        "tokens_per_second": rate,
        "mfu": share_of_peak(shape, rate),
        "gigabytes": rates.peak_bytes / 1e9,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=[name for name, shape in SHAPES.items() if shape.llama])
    args, extra = parser.parse_known_args()
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update({**here, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"})
    print(json.dumps(measure(SHAPES[args.shape], extra)))


if __name__ == "__main__":
    main()
