"""What a file of a rank keeps beside its tensors is noted, never run, and not needed for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import random_gpt
from tests.trainyard.conversion.megatron.megatron_files import Layout, write
from tests.trainyard.conversion.megatron.test_read import (
    GPT,
    change,
    read_all,
    weights_of,
    without_enum,
)
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ArtifactError

pytestmark = pytest.mark.slow


class Maker:
    """A tensor that a function makes which no file of torch.save needs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return torch.square, (self.tensor,)


def test_a_tensor_that_an_unknown_function_makes_is_refused_by_its_name(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    name = "decoder.layers.0.mlp.linear_fc2.bias"
    wanted = r"linear_fc2\.bias' of its model is refused: it asks for torch\.\S*square, "
    root = write(tmp_path / "m", whole, GPT, Layout())
    without_enum(root)
    change(root, lambda tree: tree["model"].update({name: Maker(tree["model"][name])}))
    with pytest.raises(ArtifactError, match=wanted):
        open_megatron(str(root))
    change(root, lambda tree: tree.update(model=Maker(torch.ones(2))))
    with pytest.raises(ArtifactError, match=r"its model is refused: it asks for torch\.\S*square"):
        open_megatron(str(root))


def test_unneeded_objects_never_prevent_reading_tensors(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    root = write(tmp_path / "m", whole, GPT, Layout())
    without_enum(root)
    more = {"rerun_state_machine": Maker(torch.ones(2)), Maker(torch.ones(1)): [torch.square]}
    change(root, lambda tree: tree.update(more))
    change(root, lambda tree: vars(tree["args"]).update(helper=Maker(torch.ones(2)), huge=10**400))
    found, _ = read_all(root)
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in whole.items())
