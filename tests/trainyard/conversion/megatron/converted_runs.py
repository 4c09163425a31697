"""Runs of ours converted to Megatron-LM's files, for the tests of every family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, contents
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.save import save_step
from trainyard.config import to_dict
from trainyard.conversion.megatron.write import write_megatron
from trainyard.models.config import TransformerConfig

TOKENS = 257
RUN: dict[str, Any] = {
    "lr": 1e-4,
    "min_lr": 1e-5,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "tokenizer_type": "HuggingFaceTokenizer",
}
RATE = {"max_lr": 1e-4, "min_lr": 1e-5, "warmup_steps": 8, "decay_steps": 800, "style": "cosine"}
DECAY = {"start": 0.1, "end": 0.1, "steps": 800, "style": "constant"}


def save_trained(
    root: Path,
    weights: dict[str, Tensor],
    states: dict[str, dict[str, Tensor]],
    config: TransformerConfig,
    *,
    rows: int = PADDED_VOCAB,
    tokens: int = TOKENS,
    **run: Any,
) -> None:
    """A step of a run with its optimizer, as the trainer leaves it. run: more of its options."""
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    for kind, found in states.items():
        tensors |= {f"optimizer.{kind}.{name}": tensor for name, tensor in found.items()}
    document = {
        "model": to_dict(config),
        "vocab_size": tokens,
        "padded_vocab_size": rows,
        "run": RUN | run,
    }
    state = {
        "num_updates": 98,
        "scheduled_samples": 392,
        "consumed_train_samples": 400,
        "schedule": {"learning_rate": RATE, "weight_decay": DECAY},
    }
    step_contents = contents(100, documents={"config.json": document})
    save_step(str(root), 100, tensors, replace(step_contents, state=state))


def convert(source: Any, folder: Path, **options: Any) -> Path:
    write_megatron(source, lambda name: store.open_output(str(folder / name), name), **options)
    return folder


def convert_run(tmp_path: Path, **options: Any) -> Path:
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        return convert(checkpoint, tmp_path / "made", **options)


def trees(folder: Path, step: str = "iter_0000100") -> dict[str, Any]:
    return {
        path.parent.name: torch.load(path, weights_only=False)
        for path in sorted((folder / step).rglob("model_optim_rng.pt"))
    }


ROWS = 128
"""Padded vocabulary of a run without an optimizer, and its tokens."""
NUM_TOKENS = 120


def save_weights(root: Path, config: TransformerConfig, ours: Mapping[str, Tensor]) -> None:
    """A step of a run, without its optimizer."""
    document = {"model": to_dict(config), "vocab_size": NUM_TOKENS, "padded_vocab_size": ROWS}
    tensors = {f"model.{name}": tensor for name, tensor in ours.items()}
    save_step(str(root), 100, tensors, contents(100, documents={"config.json": document}))


def convert_weights(
    folder: Path, config: TransformerConfig, ours: Mapping[str, Tensor], **target: Any
) -> Path:
    """The files of a model of ours."""
    save_weights(folder / "run", config, ours)
    return convert_run(folder, **target)


def model_in(made: Path, rank: str = "00") -> tuple[dict[str, Any], Any]:
    """The model dict of a rank, and the args."""
    file = made / "iter_0000100" / f"mp_rank_{rank}" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    return tree["model"], tree["args"]
