"""Checkpoints that Megatron-LM's own programs wrote are read, and written back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.conversion.megatron.megatron_frozen import (
    FROZEN,
    MODELS,
    OF_THE_CONVERSION,
    TOLD,
    Frozen,
    digest,
    unpacked,
)
from trainyard.artifacts import store
from trainyard.conversion.loaders import open_source
from trainyard.conversion.megatron.write import write_megatron
from trainyard.conversion.megatron.written_args import KEPT_ARGS
from trainyard.conversion.torch_dist.common import COMMON
from trainyard.conversion.torch_dist.write import write_torch_dist
from trainyard.conversion.write_native import check_source

pytestmark = pytest.mark.slow

LOADERS = {"torch": "core", "torch_dist": "torch_dist"}

BY_NAME = pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: frozen.name)


def expected_of(frozen: Frozen) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads(TOLD.read_text())[frozen.name]
    return expected


@BY_NAME
def test_checkpoints_of_megatron_are_read_bit_for_bit(frozen: Frozen, tmp_path: Path) -> None:
    expected, root = expected_of(frozen), unpacked(frozen, tmp_path)
    is_embedded = frozen.version >= "0.19" and frozen.ckpt_format == "torch_dist"
    assert any(root.rglob(COMMON)) is (frozen.ckpt_format == "torch_dist" and not is_embedded)
    with open_source(str(root), LOADERS[frozen.ckpt_format]) as source:
        check_source(source)
        weights = {
            name.removeprefix("model."): digest(source.read(name))
            for name in source.specs
            if name.startswith("model.")
        }
        assert weights == expected["weights"]
        assert (source.step, source.padded_vocab_size) == (expected["iteration"], 32)
        args: dict[str, Any] = source.args  # type: ignore[attr-defined]
        assert args["exit_signal"].source == "signal.Signals"
        assert {name: args[name] for name in expected["args"]} == expected["args"]
        if frozen.with_optimizer:
            assert (source.num_updates, source.consumed_train_samples) == (1, 6400)
            assert len(source.specs) == 3 * len(weights)
            rate = source.scheduler["max_lr"]  # type: ignore[attr-defined]
            assert rate == 1e-3


@pytest.mark.parametrize("saver", ["torch", "torch_dist"])
@pytest.mark.parametrize("model", MODELS)
def test_the_command_that_saved_a_model_finds_its_args_again(
    model: str, saver: str, tmp_path: Path
) -> None:
    frozen = next(f for f in FROZEN if (f.version, f.model) == ("0.19.2", model))
    root = unpacked(frozen, tmp_path)
    with open_source(str(root), LOADERS[frozen.ckpt_format]) as source:
        write = write_megatron if saver == "torch" else write_torch_dist
        write(source, lambda name: store.open_output(str(tmp_path / "out" / name), name))
    (path,) = (*(tmp_path / "out").rglob("model_optim_rng.pt"), *(tmp_path / "out").rglob(COMMON))
    made = vars(torch.load(path, weights_only=False)["args"])
    wanted = expected_of(frozen)["args"]
    assert wanted["add_position_embedding"] is (model != "no-position")
    names = [name for name in KEPT_ARGS if name in wanted]
    assert len(names) > 40
    assert {name: made.get(name) for name in names} == {name: wanted[name] for name in names}
    kept = {**wanted, "ckpt_format": saver}
    assert {n: made[n] for n in OF_THE_CONVERSION} == {n: kept[n] for n in OF_THE_CONVERSION}
