"""The common state that core 0.19 and later keeps among the tensors of a `torch_dist` folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import PADDED_VOCAB
from tests.trainyard.conversion.megatron.megatron_files import Layout as RankLayout
from tests.trainyard.conversion.megatron.megatron_files import arguments
from tests.trainyard.conversion.torch_dist.test_read import (
    GPT,
    read_all,
    weights_of,
)
from tests.trainyard.conversion.torch_dist.torch_dist_files import (
    Layout,
    common_in_an_object,
    write,
)
from tests.trainyard.conversion.torch_save.test_pickles import Payload
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.errors import ArtifactError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "m"
    return write(root, weights_of(GPT), GPT, Layout(own_class=False))


@pytest.fixture
def embedded(sound: Path, tmp_path: Path) -> Path:
    """A copy without common.pt."""
    shutil.copytree(sound, tmp_path / "embedded")
    return common_in_an_object(tmp_path / "embedded")


def test_common_state_among_the_tensors_is_read(sound: Path, embedded: Path) -> None:
    wanted, before = read_all(sound)
    found, source = read_all(embedded)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert (source.args, source.config) == (before.args, before.config)
    assert source.consumed_train_samples == before.consumed_train_samples == 6400


def test_a_truncated_common_state_is_refused(embedded: Path) -> None:
    path = embedded / "iter_0000100/__7_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"__7_0\.distcp: has \d+ bytes.* it is truncated"):
        open_torch_dist(str(embedded))


@pytest.mark.parametrize("held", [[], [{}, {}], {"args": 1}, [{"args": 1}], [None]])
def test_a_common_state_without_args_is_refused(sound: Path, tmp_path: Path, held: Any) -> None:
    shutil.copytree(sound, tmp_path / "m")
    common_in_an_object(tmp_path / "m", held)
    with pytest.raises(ArtifactError, match=r"__7_0\.distcp: has no args"):
        open_torch_dist(str(tmp_path / "m"))


@pytest.mark.parametrize("is_all", [True, False], ids=["in the place of args", "among the args"])
def test_a_payload_in_the_common_state_is_not_run(
    sound: Path, tmp_path: Path, is_all: bool
) -> None:
    witness = tmp_path / "ran"
    payload = Payload(os.system, f"touch {witness}")
    args: Any = payload
    if not is_all:
        args = arguments(GPT, RankLayout(), PADDED_VOCAB)
        args.exit_signal = payload
    shutil.copytree(sound, tmp_path / "m")
    common_in_an_object(tmp_path / "m", [{"args": args, "iteration": 100}])
    if is_all:
        with pytest.raises(ArtifactError, match=r"refused: it asks for posix\.system"):
            open_torch_dist(str(tmp_path / "m"))
    else:
        assert read_all(tmp_path / "m")[1].args["exit_signal"].source == "posix.system"
    assert not witness.exists()
