"""Checkpoints exchanged with Megatron-LM's own training programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.conversion.megatron.megatron_frozen import (
    MODELS,
    TRAINING_PROGRAM,
    Frozen,
    make,
    words_of,
)
from trainyard.conversion.loaders import open_source
from trainyard.conversion.megatron.written_args import KEPT_ARGS
from trainyard.models.gpt.model import GPTModel

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TOKENS = 30
"""That its tokenizer knows."""

SAVERS = {"core": "torch", "torch_dist": "torch_dist"}

LOADERS = {kind: saver for saver, kind in SAVERS.items()}


def reshard(load_dir: Path, save_dir: Path, saver: str, *words: str) -> Path:
    options = ["--saver-transformer-impl", "local"] if saver == "core" else []
    folders = ["--load-dir", str(load_dir), "--save-dir", str(save_dir)]
    command = [sys.executable, "-m", "stages.reshard", "--saver", saver, *options, *folders, *words]
    subprocess.run(command, check=True, timeout=120)
    return save_dir


def loaded(version: str, root: Path, *words: str) -> dict[str, Any]:
    """What its `load_checkpoint` makes of a folder with a command; it compares the args."""
    out = root.with_suffix(".pt")
    options = ["--load", str(root), "--no-load-rng", "--no-load-optim"]
    megatron_package.run(version, TRAINING_PROGRAM, ["load", str(out), *words, *options])
    found: dict[str, Any] = torch.load(out)
    return found


def check_ours(root: Path, kind: str, made: dict[str, Any], num_updates: int = 0) -> None:
    """Ours is the model that Megatron-LM saved."""
    with open_source(str(root), LOADERS[kind]) as source:
        assert (source.step, source.num_updates) == (made["iteration"], num_updates)
        weights = {
            name.removeprefix("model."): source.read(name)
            for name in source.specs
            if name.startswith("model.")
        }
        ours = GPTModel(source.config, source.padded_vocab_size).eval()
    assert weights.keys() == made["weights"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in made["weights"].items())
    ours.load_state_dict(weights)
    with torch.no_grad():
        logits = ours(made["tokens"])[..., :TOKENS]
    torch.testing.assert_close(logits, made["logits"][..., :TOKENS], rtol=0.0, atol=1e-5)
    ours.loss(made["tokens"], made["tokens"]).mean().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() == made["gradients"].keys()
    for name, theirs in made["gradients"].items():
        assert (gradients[name] - theirs).norm() <= 1e-5 * theirs.norm(), name


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
@pytest.mark.parametrize("version", ["0.17.1", "0.19.2"])
def test_checkpoints_of_its_training_are_read(tmp_path: Path, version: str, kind: str) -> None:
    made = make(Frozen(version, "gqa", kind, with_optimizer=True), tmp_path)
    check_ours(tmp_path / "made", kind, made, num_updates=1)


@pytest.mark.parametrize("model", MODELS)
def test_the_same_command_loads_its_converted_checkpoint(tmp_path: Path, model: str) -> None:
    made = make(Frozen("0.19.2", model), tmp_path)
    check_ours(tmp_path / "made", "torch_dist", made)
    for saver, kind in SAVERS.items():
        root = reshard(tmp_path / "made", tmp_path / saver, saver)
        found = loaded("0.19.2", root, *words_of(model, kind), "--use-checkpoint-args")
        assert found["iteration"] == 100
        assert found["logits"].equal(made["logits"])
        wanted = {name: value for name, value in made["args"].items() if name in KEPT_ARGS}
        assert len(wanted) > 40
        assert {name: found["args"].get(name) for name in wanted} == wanted


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_its_command_loads_a_model_that_went_through_ours(tmp_path: Path, model: str) -> None:
    """The args of the source do not lie in a checkpoint of ours, so they are its defaults."""
    made = make(Frozen("0.19.2", model), tmp_path)
    ours = reshard(tmp_path / "made", tmp_path / "ours", "trainyard")
    root = reshard(ours, tmp_path / "back", "torch_dist")
    found = loaded("0.19.2", root, *words_of(model))  # compares: without --use-checkpoint-args
    assert found["logits"].equal(made["logits"])
    assert found["args"]["add_position_embedding"] is True
