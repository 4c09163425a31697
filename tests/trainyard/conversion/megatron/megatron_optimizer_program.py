"""Optimizers of Megatron core beside models of every family, on a CPU: what they load of ours, and
checkpoints of their own.

    python megatron_optimizer_program.py RANK WORLD ROOT

WORLD processes, all to be started, are expert-parallel ranks. Of every folder below ROOT, where
made/ is a checkpoint in `torch_dist` with an optimizer, how.json says whether that is distributed:
loads model and optimizer strictly, with their numbers to loaded.RANK.pt. Then draws others, saves
them to theirs/ in the kind that how.json names, and puts them into saved.RANK.pt. Numbers are
{name of the parameter here: {kind: tensor}}."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import engine_stand_in  # type: ignore[import-not-found]
import megatron_buckets_program as buckets
import megatron_family_program as families
import torch
import torch.distributed as dist
from torch import Tensor

NUM_STEPS = 98


class FusedAdam(torch.optim.Optimizer):
    """Keeps its steps in its groups, as Transformer Engine's; takes none."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)


def install_adam() -> None:
    """Make Megatron take it for Transformer Engine's."""
    name = "transformer_engine.pytorch.optimizers"
    sys.modules[name] = engine_stand_in._Any(name)
    sys.modules[name].FusedAdam = FusedAdam  # type: ignore[attr-defined]


def built(args: argparse.Namespace, distributed: bool, bucket: int | None) -> tuple[Any, Any]:
    """The model in bf16 in Megatron's data parallelism, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    module = families.model_of(args).bfloat16()
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=True,
        grad_reduce_in_fp32=True,
        bucket_size=bucket,
    )
    model = DistributedDataParallel(module.config, options, module)
    chosen = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed,
    )
    return model, get_megatron_optimizer(chosen, [model])


def states_of(model: Any, optimizer: Any) -> Iterator[tuple[str, Any, Tensor, tuple[int, int]]]:
    """(name, Adam, fp32 parameter, begin and end of this rank's part) of all that it keeps."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    for one in optimizer.chained_optimizers:
        if hasattr(one, "model_param_group_index_map"):
            for parameter, (group, number) in one.model_param_group_index_map.items():
                main = one.optimizer.param_groups[group]["params"][number]
                part = one._get_model_param_range_map(parameter)["param"]
                yield names[parameter], one.optimizer, main, (part.start, part.end)
        else:
            for ours, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                for parameter, main in zip(ours, mains, strict=True):
                    yield names[parameter], one.optimizer, main, (0, main.numel())


def draw(model: Any, optimizer: Any, salt: str) -> None:
    """Other numbers; those that ranks hold alike are alike."""
    for name, adam, main, (begin, end) in states_of(model, optimizer):
        is_expert = ".experts." in name
        whole = dict(model.module.named_parameters())[name].numel()
        seed = crc32(repr((salt, name, is_expert and dist.get_rank())).encode())
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(whole, generator=generator)[begin:end] for _ in range(3)]
        main.data.copy_(drawn[0].view(main.shape))
        adam.state[main] = {
            "exp_avg": drawn[1].view(main.shape).clone(),
            "exp_avg_sq": drawn[2].view(main.shape).clone(),
        }
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            group["step"] = NUM_STEPS
        one._copy_main_params_to_model_params()
    for bucket in model.bucket_groups + model.expert_parallel_bucket_groups:
        if bucket.ddp_config.use_distributed_optimizer:
            bucket.start_param_sync(force_sync=True)


def numbers(model: Any, optimizer: Any) -> dict[str, Any]:
    """The weights, and of each state this rank's part with its begin and end."""
    states: dict[str, Any] = {}
    steps = {g["step"] for one in optimizer.chained_optimizers for g in one.optimizer.param_groups}
    for name, adam, main, part in states_of(model, optimizer):
        state = adam.state[main]
        kinds = {"param": main, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        states[name] = (part, {kind: t.detach().flatten().clone() for kind, t in kinds.items()})
    weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return {"weights": weights, "states": states, "steps": steps}


def sharded(model: Any, optimizer: Any, metadata: dict[str, Any], loading: bool) -> dict[str, Any]:
    weights = model.module.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return {"model": weights, "optimizer": states}


def run(folder: Path, rank: int, world: int) -> None:
    """Everything of one model."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    how = json.loads((folder / "how.json").read_text())
    (made,) = (folder / "made").glob("iter_*")
    common = dist_checkpointing.load_common_state_dict(str(made))
    args, metadata = common["args"], common["content_metadata"]
    args.expert_model_parallel_size = world
    # Of several buckets it pads what it gathers with zeros, as it says.
    bucket = 4000 if how["sharding_type"] == "dp_reshardable" else None
    model, optimizer = built(args, how["distributed"], bucket)
    draw(model, optimizer, "at first")  # other numbers than those to load
    tree, unasked, lacking = dist_checkpointing.load(
        sharded(model, optimizer, metadata, True), str(made), strict=StrictHandling.RETURN_ALL
    )
    assert not lacking, lacking
    assert not {key for key in unasked if "_extra_state" not in key}, unasked
    model.module.load_state_dict(tree["model"], strict=True)
    optimizer.load_state_dict(tree["optimizer"])
    torch.save(numbers(model, optimizer), folder / f"loaded.{rank}.pt")

    draw(model, optimizer, "to save")
    torch.save(numbers(model, optimizer), folder / f"saved.{rank}.pt")
    theirs = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    if how["distributed"]:
        theirs["distrib_optim_sharding_type"] = how["sharding_type"]
    target = folder / "theirs" / "iter_0000100"
    target.mkdir(parents=True, exist_ok=True)
    args.world_size = world
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 100, "content_metadata": theirs}
    dist_checkpointing.save(state | sharded(model, optimizer, theirs, False), str(target))
    (folder / "theirs" / "latest_checkpointed_iteration.txt").write_text("100")


def main(words: list[str]) -> None:
    """See above."""
    rank, world, root = int(words[0]), int(words[1]), Path(words[2])
    engine_stand_in.install()
    install_adam()
    degrees = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
    }
    ranks = {"world_size": world, "expert_model_parallel_size": world}
    buckets.begin(root, rank, argparse.Namespace(**degrees, **ranks))
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        print(folder.name, flush=True)
        run(folder, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
