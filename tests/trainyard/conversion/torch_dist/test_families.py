"""Every family in `torch_dist`: Megatron core's keys and shapes, read by torch and by us."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt
from tests.trainyard.conversion.megatron import test_experts, test_t5
from tests.trainyard.conversion.megatron.converted_runs import ROWS, save_trained, save_weights
from tests.trainyard.conversion.megatron.test_read import states_of
from tests.trainyard.conversion.torch_dist.families import (
    FAMILIES,
    Sample,
    impl_of,
    written,
)
from tests.trainyard.conversion.torch_dist.frozen_keys import GOLDEN
from tests.trainyard.conversion.torch_dist.test_write import convert, load_with_torch
from tests.trainyard.conversion.torch_dist.torch_dist_files import (
    Planner,
    Stored,
    megatron_metadata,
    quietly_save,
)
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.megatron.model import whole_model
from trainyard.conversion.torch_dist.names import name_tensors
from trainyard.conversion.torch_dist.plan import plan_torch_dist
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.conversion.torch_dist.write import write_torch_dist
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.checkpoint_names import EXPERT_BIAS

pytestmark = pytest.mark.slow

KINDS = pytest.mark.parametrize("kind", FAMILIES)

SPLIT = ("experts", "deepseek", "t5", "hybrid")
"""With an axis of layers and of experts, with neither, and with parts of tensors."""


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


def check(root: Path, sample: Sample) -> None:
    """What is read is the model, bit for bit."""
    config, ours = sample
    with open_torch_dist(str(root)) as source:
        assert source.specs.keys() == {f"model.{name}" for name in ours}
        for name, tensor in ours.items():
            found = source.read(f"model.{name}")
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name
        assert source.config.model_type == config.model_type
        assert source.config.num_layers == config.num_layers
        assert source.config.experts.num_experts == config.experts.num_experts
        assert source.config.experts.pattern(config.num_layers) == config.experts.pattern(
            config.num_layers
        )
        assert (source.config.latent, source.config.mtp) == (config.latent, config.mtp)
        assert source.config.activation == config.activation


@KINDS
def test_keys_shapes_and_objects_are_megatron_cores(kind: str, tmp_path: Path) -> None:
    save_weights(tmp_path, *FAMILIES[kind]())
    with open_checkpoint(str(tmp_path)) as checkpoint:
        plan = plan_torch_dist(whole_model(checkpoint), False, impl_of(kind))
    wanted = golden()[kind]
    assert {piece.key: list(piece.global_shape) for piece in plan.pieces} == wanted["tensors"]
    # Local norms have no state, and do not mind that files have one.
    assert set(plan.objects) >= set(wanted["objects"])
    assert impl_of(kind) == "local" or set(plan.objects) == set(wanted["objects"])


@KINDS
def test_torch_and_we_read_what_is_written(kind: str, tmp_path: Path) -> None:
    sample = FAMILIES[kind]()
    made = written(tmp_path, sample, transformer_impl=impl_of(kind), num_files=2)
    tensors = load_with_torch(made / "iter_0000100")
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    assert shapes == golden()[kind]["tensors"]
    check(made, sample)


@pytest.mark.parametrize("kind", SPLIT)
def test_pieces_of_several_ranks_are_joined(kind: str, tmp_path: Path) -> None:
    """Every tensor in as many pieces as tensor, expert and pipeline ranks would write, and more:
    halved along each dim that can be."""
    sample = FAMILIES[kind]()
    made = written(tmp_path, sample)
    folder = made / "iter_0000100"
    stored = {
        key: Stored(tuple(tensor.shape), pieces_of(tensor))
        for key, tensor in load_with_torch(folder).items()
    }
    again = tmp_path / "again" / "iter_0000100"
    with megatron_metadata():
        quietly_save(again, Planner(stored, {}, True))
    for name in ("common.pt", "metadata.json"):
        shutil.copy(folder / name, again / name)
    check(again, sample)


def pieces_of(tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    pieces: list[tuple[tuple[int, ...], Tensor]] = [((0,) * tensor.dim(), tensor)]
    for dim, size in enumerate(tensor.shape):
        if size % 2:
            continue
        pieces = [
            ((*at[:dim], at[dim] + half * size // 2, *at[dim + 1 :]), part)
            for at, piece in pieces
            for half, part in enumerate(piece.chunk(2, dim))
        ]
    return pieces


def test_half_precision_stays_and_biases_of_the_choice_are_fp32(tmp_path: Path) -> None:
    config, ours = FAMILIES["deepseek"]()
    half = {
        name: tensor if name.endswith("expert_bias") else tensor.bfloat16()
        for name, tensor in ours.items()
    }
    check(written(tmp_path, (config, half)), (config, half))


@pytest.mark.parametrize(("ep", "distributed"), [(1, False), (2, False), (4, True)])
def test_states_of_a_mixture_are_written_and_read(
    tmp_path: Path, ep: int, distributed: bool
) -> None:
    """With several expert-parallel ranks, the experts have an optimizer of their own."""
    config = test_experts.CONFIG
    whole = random_gpt(config).state_dict()
    trained = {name: t for name, t in whole.items() if not name.endswith(EXPERT_BIAS)}
    states = {kind: states_of(trained)[kind] for kind in ("exp_avg", "exp_avg_sq")}
    run = {"use_distributed_optimizer": distributed, "expert_model_parallel_size": ep}
    save_trained(tmp_path / "run", whole, states, config, tokens=PADDED_VOCAB, **run)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        made = convert(checkpoint, tmp_path / "made")
    wanted = {f"optimizer.{k}.{name}": t for k, of in states.items() for name, t in of.items()}
    wanted |= {f"model.{name}": tensor for name, tensor in whole.items()}
    with open_torch_dist(str(made)) as source:
        assert source.specs.keys() == wanted.keys()
        assert [n for n, t in wanted.items() if not torch.equal(source.read(n), t)] == []
        assert source.num_updates == 98
    common = torch.load(made / "iter_0000100/common.pt", weights_only=False)
    found = common["optimizer"]
    both = [found[0], found[1]] if ep > 1 else [found]
    groups = [one["optimizer" if distributed else "param_groups"] for one in both]
    groups = [one["param_groups"] if distributed else one for one in groups]
    kinds = [{(g["is_expert_parallel"], g["wd_mult"]) for g in one} for one in groups]
    dense = {(False, 0.0), (False, 1.0)}
    assert kinds == ([dense, {(True, 1.0)}] if ep > 1 else [dense])
    assert common["args"].expert_model_parallel_size == ep
    assert [g["step"] for one in groups for g in one] == [98] * sum(map(len, groups))


@pytest.mark.parametrize("distributed", [False, True])
def test_states_of_a_retro_are_written_and_read(tmp_path: Path, distributed: bool) -> None:
    config, whole = FAMILIES["retro"]()
    states = {kind: states_of(whole)[kind] for kind in ("exp_avg", "exp_avg_sq")}
    run = {"use_distributed_optimizer": distributed}
    save_trained(tmp_path / "run", whole, states, config, rows=ROWS, tokens=ROWS, **run)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        made = convert(checkpoint, tmp_path / "made")
    wanted = {f"optimizer.{k}.{name}": t for k, of in states.items() for name, t in of.items()}
    wanted |= {f"model.{name}": tensor for name, tensor in whole.items()}
    with open_torch_dist(str(made)) as source:
        assert source.specs.keys() == wanted.keys()
        assert [n for n, t in wanted.items() if not torch.equal(source.read(n), t)] == []
        assert source.num_updates == 98


def test_a_t5_may_have_a_deeper_decoder_only_where_megatron_lm_computes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as many layers in the decoder"):
        written(tmp_path, test_t5.weights(decoder_num_layers=1))
    assert not (tmp_path / "made").exists()


def test_parts_of_a_tensor_must_fit_together(tmp_path: Path) -> None:
    made = written(tmp_path, FAMILIES["hybrid"]())
    folder = made / "iter_0000100"
    tensors = load_with_torch(folder)
    part = "decoder.layers.0.mixer.in_proj.weight.B"
    lacking = {key: tensor for key, tensor in tensors.items() if key != part}
    other = tensors | {part: tensors[part].bfloat16()}
    for changed, said in ((lacking, r"in_proj\.weight"), (other, "do not fit together")):
        again = tmp_path / said[:6] / "iter_0000100"
        quietly_save(again, None, **changed)
        for name in ("common.pt", "metadata.json"):
            shutil.copy(folder / name, again / name)
        with pytest.raises(ArtifactError, match=said):
            open_torch_dist(str(again))


def test_a_part_that_comes_twice_is_refused() -> None:
    whole = "decoder.layers.0.mixer.conv1d.bias"
    shapes = {whole: (16,), f"{whole}.x": (8,)}
    with pytest.raises(ValueError, match=r"are both model\.decoder\.layers\.0\.mixer"):
        name_tensors(shapes, tied=True, family="mamba")


def test_a_copy_of_the_head_is_read_once(tmp_path: Path) -> None:
    """Megatron core's T5 has its output layer and positions under two names each."""
    keys = golden()["t5"]["tensors"]
    assert {"output_layer.bias", "lm_head.output_layer.bias"} <= keys.keys()
    named = name_tensors({key: tuple(shape) for key, shape in keys.items()}, tied=True, family="t5")
    assert not named.unknown
    assert named.sources["model.output_layer.bias"].keys == ("lm_head.output_layer.bias",)
    assert named.sources["model.embedding.position_embeddings.weight"].keys == (
        "embedding.position_embeddings.weight",
    )


def test_nothing_is_written_of_what_megatron_core_does_not_have(tmp_path: Path) -> None:
    config, ours = test_t5.weights(relu=True)
    save_weights(tmp_path / "run", config, ours)
    opened: list[str] = []
    with (
        open_checkpoint(str(tmp_path / "run")) as checkpoint,
        pytest.raises(ConfigError, match="T5 has no --relu"),
    ):
        write_torch_dist(checkpoint, opened.append)  # type: ignore[arg-type]
    assert opened == []
