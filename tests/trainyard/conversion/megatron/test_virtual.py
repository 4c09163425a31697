"""Files for Megatron-LM's interleaved schedule: which layers lie where, and that none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.conversion.megatron.converted_runs import (
    convert,
    convert_run,
    save_trained,
    trees,
)
from tests.trainyard.conversion.megatron.megatron_files import Layout, write
from tests.trainyard.conversion.megatron.test_read import (
    LLAMA_OPTIONS,
    SIZES,
    read_all,
    states_of,
    weights_of,
)
from tests.trainyard.conversion.megatron.test_write import (
    assert_handed_on,
    handed_on,
    options_of,
    trees_by_hand,
)
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.megatron.names import flatten
from trainyard.conversion.megatron.read import open_megatron
from trainyard.models.gpt.config import GPTConfig

pytestmark = pytest.mark.slow

EIGHT = GPTConfig(**{**SIZES, "num_layers": 8})
"""Tied, with biases and positions."""
UNTIED = GPTConfig(**{**LLAMA_OPTIONS, "num_layers": 8})

ASSIGNED: list[tuple[int, int, dict[str, list[list[int]]]]] = [
    (2, 2, {"000": [[0, 1], [4, 5]], "001": [[2, 3], [6, 7]]}),
    (2, 4, {"000": [[0], [2], [4], [6]], "001": [[1], [3], [5], [7]]}),
    (4, 2, {"000": [[0], [4]], "001": [[1], [5]], "002": [[2], [6]], "003": [[3], [7]]}),
]
"""(pp, vpp, layers of each chunk by pipeline rank). The first two are the examples that
Megatron-LM's own transformer block gives beside its sum."""

NORM = {
    "local": "decoder.layers.{}.input_layernorm.weight",
    "engine": "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight",
    "legacy": "language_model.encoder.layers.{}.input_norm.weight",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"model_class": "core", "transformer_impl": "local"},
    "engine": {"model_class": "core"},
    "legacy": {"model_class": "legacy"},
}
ENDS = {
    "local": ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"),
    "engine": ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"),
    "legacy": (
        "language_model.embedding.word_embeddings.weight",
        "language_model.encoder.final_norm.weight",
    ),
}
HEADS = {
    ("local", True): "output_layer.weight",
    ("engine", True): "output_layer.weight",
    ("legacy", True): "word_embeddings_for_head.weight",
    ("local", False): "output_layer.weight",
    ("engine", False): "output_layer.weight",
    ("legacy", False): "language_model.output_layer.weight",
}
"""Of the last stage, by whether weights are tied."""


def save_numbered(root: Path, config: GPTConfig) -> None:
    """A step in which the first norm of layer n is all n."""
    model = random_gpt(config)
    for number in range(config.num_layers):
        norm = model.get_parameter(f"decoder.layers.{number}.input_layernorm.weight")
        torch.nn.init.constant_(norm, number)
    save_gpt(str(root), model, 100)


@pytest.mark.parametrize(
    ("style", "config"),
    [
        pytest.param("engine", EIGHT, id="engine, tied"),
        pytest.param("legacy", UNTIED, id="legacy, untied"),
        pytest.param("local", UNTIED, id="local, untied", marks=pytest.mark.slow),
        pytest.param("legacy", EIGHT, id="legacy, tied", marks=pytest.mark.slow),
    ],
)
def test_layers_are_where_the_interleaved_schedule_expects_them(
    tmp_path: Path, style: str, config: GPTConfig
) -> None:
    save_numbered(tmp_path / "run", config)
    embedding, final_norm = ENDS[style]
    head = HEADS[style, config is EIGHT]
    for pp, vpp, assigned in ASSIGNED:
        with open_checkpoint(str(tmp_path / "run")) as checkpoint:
            made = convert(
                checkpoint,
                tmp_path / f"{pp}-{vpp}",
                **{**OPTIONS[style], "pp": pp, "vpp": vpp, "save_optimizer": False},
            )
        found = trees(made)
        assert found.keys() == {f"mp_rank_00_{stage}" for stage in assigned}
        for name, tree in found.items():
            stage = name.rpartition("_")[2]
            keys = [key for key in tree if key.startswith("model")]
            assert keys == [f"model{chunk}" for chunk in range(vpp)]
            for chunk, layers in enumerate(assigned[stage]):
                held = dict(flatten(tree[f"model{chunk}"]))
                begin, end = NORM[style].split("{}")
                norms = [path for path in held if path.startswith(begin) and path.endswith(end)]
                assert norms == [NORM[style].format(local) for local in range(len(layers))]
                assert [held[path].unique().tolist() for path in norms] == [[n] for n in layers]
                is_first = (stage, chunk) == ("000", 0)
                is_last = (stage, chunk) == (max(assigned), vpp - 1)
                assert (embedding in held) == is_first
                assert (final_norm in held) == (head in held) == is_last
            assert tree["args"].pipeline_model_parallel_size == pp
            assert tree["args"].virtual_pipeline_model_parallel_size == vpp
            assert tree["args"].num_layers_per_virtual_pipeline_stage == 8 // pp // vpp


def test_the_optimizer_counts_its_parameters_over_the_virtual_stages(tmp_path: Path) -> None:
    """Group after group, in each of them chunk after chunk, as in files that were made by hand."""
    weights = {n: t.bfloat16() for n, t in weights_of(random_gpt(UNTIED)).items()}
    states = states_of(weights)
    save_trained(tmp_path / "run", weights, states, UNTIED)
    weights, states["param"] = (
        {name: handed_on(name, tensor) for name, tensor in found.items()}
        for found in (weights, states["param"])
    )
    layout = Layout(spelling="engine", tp=2, pp=2, vpp=2, optimizer="plain", extra_state=False)
    wanted = trees_by_hand(write(tmp_path / "hand", weights, UNTIED, layout, states))
    made = trees(convert_run(tmp_path, **options_of(layout)))
    for rank, tree in wanted.items():
        ours, theirs = (found["optimizer"] for found in (made[rank], tree))
        groups, expected = (found["optimizer"]["param_groups"] for found in (ours, theirs))
        assert [group["params"] for group in groups] == [group["params"] for group in expected]
        assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
        for number, state in theirs["optimizer"]["state"].items():
            for kind, tensor in state.items():
                assert torch.equal(ours["optimizer"]["state"][number][kind], tensor)
        mains = (found["fp32_from_fp16_params"] for found in (ours, theirs))
        for left, right in zip(*mains, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            {"model_class": "legacy", "pp": 2, "vpp": 4},
            {"model_class": "core", "transformer_impl": "local", "tp": 2, "pp": 2, "vpp": 2},
        ),
        pytest.param(
            {"model_class": "core", "tp": 2, "pp": 4, "vpp": 2},
            {"model_class": "legacy", "tp": 4, "pp": 2, "vpp": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["legacy to core", "core to legacy"],
)
def test_any_number_of_virtual_stages_after_another_is_the_same_checkpoint(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Ours to theirs, to theirs at another layout and class: weights, moments and main weights."""
    weights = {n: t.bfloat16() for n, t in weights_of(random_gpt(EIGHT)).items()}
    states = states_of(weights)
    save_trained(tmp_path / "run", weights, states, EIGHT)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        made = convert(checkpoint, tmp_path / "first", **first)
    with open_megatron(str(made)) as source:
        again = convert(source, tmp_path / "second", **second)
    found, _ = read_all(again)
    assert len(found) == len(weights) * 4
    assert_handed_on(found, weights, states)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("style", list(NORM))
def test_every_layout_reads_back(tmp_path: Path, style: str, pp: int, vpp: int, tp: int) -> None:
    save_numbered(tmp_path / "run", EIGHT)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        wanted = {name: checkpoint.read(name) for name in checkpoint.names("model.")}
        made = convert(
            checkpoint, tmp_path / "made", **{**OPTIONS[style], "tp": tp, "pp": pp, "vpp": vpp}
        )
    found, config = read_all(made)
    assert config.num_layers == 8
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
