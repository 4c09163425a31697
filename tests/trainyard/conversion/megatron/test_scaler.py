"""The loss scale of an fp16 run, read from and written to Megatron-LM's files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import random_gpt
from tests.trainyard.conversion.megatron import megatron_files
from tests.trainyard.conversion.megatron.converted_runs import RUN, trees
from tests.trainyard.conversion.megatron.megatron_files import Layout
from tests.trainyard.conversion.megatron.test_read import (
    GPT,
    states_of,
    weights_of,
)
from tests.trainyard.conversion.test_write_native import into
from tests.trainyard.conversion.torch_dist import torch_dist_files
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.loaders import open_source
from trainyard.conversion.megatron.write import write_megatron
from trainyard.conversion.torch_dist.write import write_torch_dist
from trainyard.conversion.vocabulary import Adjusted
from trainyard.conversion.write_native import state_document
from trainyard.errors import ArtifactError
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.scaler import build_scaler

SCALE = 262144.0
OURS = {"scale": SCALE, "growth_tracker": 17, "hysteresis_tracker": 1}

SMALL = replace(GPT, num_layers=2)

PLAIN = Layout(optimizer="plain", args=RUN)


def scaler(**other: Any) -> dict[str, Any]:
    """As DynamicGradScaler.state_dict() has it, on the CPU."""
    return {"scale": torch.tensor([SCALE]), "growth_tracker": 17, "hysteresis_tracker": 1, **other}


def weights() -> dict[str, Tensor]:
    return {name: t.half() for name, t in weights_of(random_gpt(SMALL)).items()}


def written(root: Path, layout: Layout) -> Path:
    whole = weights()
    return megatron_files.write(root, whole, SMALL, layout, states_of(whole))


def dist(root: Path, **optimizer: Any) -> Path:
    whole = weights()
    inner: dict[str, Any] = {"state": {"common_step": 98}, "param_groups": []}
    common = {"optimizer": {"optimizer": inner, **optimizer}}
    layout = torch_dist_files.Layout(common=common, args=RUN)
    return torch_dist_files.write(root, whole, SMALL, layout, states_of(whole))


def read(root: Path, loader: str = "core") -> dict[str, Any]:
    with open_source(str(root), loader) as source:
        return state_document(source)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, optimizer="plain"),
        Layout(spelling="legacy", optimizer="plain"),
        Layout(spelling="oldest", version=0.0, tp=2, optimizer="plain"),
    ],
    ids=["core", "legacy", "oldest"],
)
def test_the_scale_comes_with_the_optimizer(
    tmp_path: Path, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    state = read(written(tmp_path, replace(layout, scaler=scaler())))
    assert state["loss_scaler"] == OURS
    assert state["num_updates"] == 98
    assert "scale of the loss" not in caplog.text
    # What is read is what our optimizer goes on with.
    goes_on = build_scaler(PrecisionConfig(fp16=True))
    goes_on.load_state_dict(json.loads(json.dumps(state["loss_scaler"])))
    assert goes_on.scale == SCALE
    goes_on.update(found_inf=True)  # the last life
    assert goes_on.scale == SCALE / 2


def test_the_scale_comes_with_the_distributed_optimizer(tmp_path: Path) -> None:
    wide = replace(SMALL, hidden_size=128)
    whole = {name: t.half() for name, t in weights_of(random_gpt(wide)).items()}
    layout = Layout(optimizer="distributed", scaler=scaler())
    megatron_files.write(tmp_path, whole, wide, layout, states_of(whole))
    assert read(tmp_path)["loss_scaler"] == OURS


@pytest.mark.slow  # torch imports its compiler for this
def test_the_scale_comes_from_torch_dist(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(dist(tmp_path / "a", grad_scaler=scaler()), "torch_dist")["loss_scaler"] == OURS
    assert "scale of the loss" not in caplog.text
    assert "loss_scaler" not in read(dist(tmp_path / "b"), "torch_dist")
    assert "has no loss scale" in caplog.text
    with pytest.raises(ArtifactError, match=r"common\.pt: growth_tracker of its grad_scaler"):
        read(dist(tmp_path / "c", grad_scaler=scaler(growth_tracker="x")), "torch_dist")


def test_a_step_of_ours_has_the_scale(tmp_path: Path) -> None:
    written(tmp_path / "m", replace(PLAIN, scaler=scaler()))
    with open_source(str(tmp_path / "m"), "core") as source:
        into(source, tmp_path / "ours/iter_0000100")
    with open_checkpoint(str(tmp_path / "ours")) as checkpoint:
        assert checkpoint.state["loss_scaler"] == OURS


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model_class", "adjusted"), [("core", False), ("legacy", False), ("core", True)]
)
def test_the_scale_is_written_to_files_of_megatron(
    tmp_path: Path, model_class: str, adjusted: bool
) -> None:
    """Converted again, to the other model class, and with another vocabulary."""
    written(tmp_path / "m", replace(PLAIN, scaler=scaler()))
    with open_source(str(tmp_path / "m"), "core") as source:
        write_megatron(
            Adjusted(source, true_vocab_size=257, divisible_by=16) if adjusted else source,
            lambda name: store.open_output(str(tmp_path / "made" / name), name),
            model_class=model_class,  # type: ignore[arg-type]
            tp=2,
        )
    found = trees(tmp_path / "made")
    assert len(found) == 2
    for tree in found.values():
        written_scaler = tree["optimizer"]["grad_scaler"]
        assert torch.equal(written_scaler.pop("scale"), torch.tensor([SCALE]))
        assert written_scaler == {"growth_tracker": 17, "hysteresis_tracker": 1}
    assert read(tmp_path / "made")["loss_scaler"] == OURS


@pytest.mark.slow  # torch imports its compiler for this
def test_the_scale_is_written_to_torch_dist(tmp_path: Path) -> None:
    written(tmp_path / "m", replace(PLAIN, scaler=scaler()))
    with open_source(str(tmp_path / "m"), "core") as source:
        write_torch_dist(
            source, lambda name: store.open_output(str(tmp_path / "made" / name), name)
        )
    assert read(tmp_path / "made", "torch_dist")["loss_scaler"] == OURS


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("dtype", "args", "warned"),
    [
        ("half", {}, True),
        ("half", {"loss_scale": 1024.0}, False),  # constant: there is no state of it
        ("bfloat16", {}, False),
    ],
)
def test_an_fp16_run_without_a_scale_logs_a_warning(
    tmp_path: Path,
    dtype: str,
    args: dict[str, Any],
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = {name: t.to(getattr(torch, dtype)) for name, t in weights().items()}
    layout = Layout(optimizer="plain", scaler={}, args=args)
    megatron_files.write(tmp_path, whole, SMALL, layout, states_of(whole))
    assert "loss_scaler" not in read(tmp_path)
    assert ("has no loss scale (grad_scaler)" in caplog.text) == warned
    assert ("--initial-loss-scale" in caplog.text) == warned


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("scaler", "message"),
    [
        (5, r"mp_rank_00.*: its grad_scaler is 5, wanted a table"),
        (scaler(scale=torch.tensor([float("nan")])), "scale of its grad_scaler is nan"),
        (scaler(scale=torch.tensor([0.0])), r"scale of its grad_scaler is 0\.0"),
        (scaler(scale=torch.ones(2)), "scale of its grad_scaler is "),
        (scaler(scale=-1.0), "scale of its grad_scaler is -1"),
        (scaler(growth_tracker=1.5), r"growth_tracker of its grad_scaler is 1\.5"),
        (scaler(hysteresis_tracker=None), "hysteresis_tracker of its grad_scaler is None"),
        ({"scale": torch.ones(1)}, "growth_tracker of its grad_scaler is None"),
        (
            scaler(growth_tracker=2**70),
            "growth_tracker of its grad_scaler is 1180591620717411303424",
        ),
    ],
)
def test_a_scale_that_no_run_has_is_refused(tmp_path: Path, scaler: Any, message: str) -> None:
    written(tmp_path, replace(PLAIN, scaler=scaler))
    with pytest.raises(ArtifactError, match=message):
        open_source(str(tmp_path), "core")


def test_ranks_of_two_scales_are_refused(tmp_path: Path) -> None:
    half = scaler(scale=torch.tensor([SCALE / 2]))
    written(tmp_path / "m", replace(PLAIN, tp=2, scaler=scaler()))
    written(tmp_path / "other", replace(PLAIN, tp=2, scaler=half))
    name = "iter_0000100/mp_rank_01/model_optim_rng.pt"
    shutil.copy(tmp_path / "other" / name, tmp_path / "m" / name)
    with pytest.raises(ArtifactError, match=r"mp_rank_01.*131072.*mp_rank_00.*262144"):
        open_source(str(tmp_path / "m"), "core")
