"""What a checkpoint holds of a model, by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainyard.checkpoint.model_tensors import model_tensors


def held(model: nn.Module, *, buffers_apart: bool) -> dict[str, Tensor]:
    found = model_tensors([model], buffers_apart=buffers_apart)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def test_weights_are_live_memory_and_buffers_are_copied_for_async_saves() -> None:
    model = nn.BatchNorm1d(4)
    found = held(model, buffers_apart=False)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert found[f"model.{name}"].data_ptr() == tensor.data_ptr()


def test_a_forward_pass_changes_no_buffer_that_is_being_saved() -> None:
    model = nn.BatchNorm1d(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = held(model, buffers_apart=True)
    model(torch.randn(8, 4))
    assert not torch.equal(model.state_dict()["running_mean"], before["running_mean"])
    for name, tensor in before.items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    assert found["model.weight"].data_ptr() == model.weight.data_ptr(), "weights are not copied"
