"""Reading the optimizer that Megatron core 0.16.1's own distributed optimizer saved."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB
from tests.trainyard.conversion.megatron import megatron_core_program, megatron_package
from tests.trainyard.conversion.megatron.megatron_files import Layout, arguments, part_of_rank
from tests.trainyard.conversion.megatron.test_read import GPT, LLAMA, QWEN
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.models.gpt.config import GPTConfig

pytestmark = pytest.mark.full

PROGRAM = Path(str(megatron_core_program.__file__)).parent / "megatron_buckets_program.py"

PLAIN = (bool, int, float, str, type(None))

Kept = dict[tuple[int, str], tuple[int, int, dict[str, Tensor]]]


def megatron(folder: Path, config: GPTConfig, layout: Layout, dp: int, bucket: int) -> list[Kept]:
    """A checkpoint in folder/made; what each rank put into it."""
    values = vars(arguments(config, layout, PADDED_VOCAB)).items()
    args = {name: value for name, value in values if type(value) in PLAIN}
    world = layout.tp * layout.pp * dp
    args |= {"transformer_impl": "local", "world_size": world}
    args["virtual_pipeline_model_parallel_size"] = layout.vpp if layout.vpp > 1 else None
    (folder / "args.json").write_text(json.dumps(args))
    words = [str(folder / "args.json"), str(bucket), str(folder / "made"), str(folder)]
    megatron_package.run_ranks("0.16.1", PROGRAM, [words] * world, folder / "log.txt")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def in_the_whole(name: str, stage: int, layers: int) -> str:
    """The name of a parameter of a stage, each of so many layers."""
    if not name.startswith("decoder.layers."):
        return name
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return f"decoder.layers.{int(number) + stage * layers}.{rest}"


@pytest.mark.parametrize(
    ("config", "layout", "dp", "bucket"),
    [
        pytest.param(GPT, Layout(), 2, 4000, id="gpt dp2"),
        pytest.param(GPT, Layout(pp=2), 1, 4000, id="gpt pp2, tied"),
        pytest.param(GPT, Layout(pp=2, vpp=2), 1, 4000, id="gpt pp2 vpp2, tied"),
        pytest.param(LLAMA, Layout(tp=2), 1, 3000, id="llama tp2"),
        pytest.param(QWEN, Layout(tp=2, pp=2), 1, 2000, id="qwen tp2 pp2"),
    ],
)
def test_optimizer_states_of_megatron_core_are_read(
    tmp_path: Path, config: GPTConfig, layout: Layout, dp: int, bucket: int
) -> None:
    tp, pp, vpp = layout.tp, layout.pp, layout.vpp
    ranks = megatron(tmp_path, config, layout, dp, bucket)
    compared: Counter[str] = Counter()
    with open_torch_dist(str(tmp_path / "made")) as source:
        found = {name: source.read(name) for name in source.specs}
        assert (source.step, source.num_updates) == (100, 98)
        assert len(source.specs) == 4 * sum(name.startswith("model.") for name in source.specs)
    for rank, kept in enumerate(ranks):
        tensor, stage = rank % tp, rank // (tp * dp)  # tensor ranks, data ranks, stages
        for (chunk, name), (first, end, values) in kept.items():
            ours = in_the_whole(name, stage + pp * chunk, config.num_layers // (pp * vpp))
            if name == "output_layer.weight" and f"model.{name}" not in found:
                continue  # the copy of the tied embedding has states of its own
            for kind, wanted in values.items():
                whole = found[f"optimizer.{kind}.{ours}"]
                part = part_of_rank(ours, whole, config, 3.0, tensor, tp)
                assert torch.equal(part.flatten()[first:end], wanted), (rank, kind, name)
                compared[f"optimizer.{kind}.{ours}"] += len(wanted)
    for name in source.specs:
        if name.startswith("optimizer."):  # tensor ranks may hold the same
            assert compared[name] in (found[name].numel(), found[name].numel() * tp), name
