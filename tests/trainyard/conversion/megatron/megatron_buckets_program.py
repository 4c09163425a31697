"""Megatron core's own distributed optimizer, on a CPU: a checkpoint of its default kind, and what
was put into it.

    python megatron_buckets_program.py RANK ARGS BUCKET ROOT OUT

One process for each rank of as many as ARGS say (`world_size`); all are to be started. RANK: its
number. BUCKET: numbers after which a bucket is closed. OUT gets, in a file for each rank, what it
keeps of parameters, by virtual stage and name: first, end, and values of each kind."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import megatron_core_program as core
import torch
import torch.distributed as dist

KINDS = ("param", "exp_avg", "exp_avg_sq")


def begin(folder: Path, rank: int, args: argparse.Namespace) -> None:
    from megatron.core import parallel_state

    store = dist.FileStore(str(folder / "rendezvous"), args.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.world_size)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=getattr(args, "expert_model_parallel_size", 1),
    )
    core.without_gpu()
    kind = torch.Tensor.type

    def as_of_gpu(self: torch.Tensor, *rest: Any, **options: Any) -> Any:
        found = kind(self, *rest, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    make = torch.tensor

    def on_cpu(*values: Any, **options: Any) -> torch.Tensor:
        return make(*values, **{**options, "device": core.CPU})

    torch.Tensor.type = as_of_gpu  # type: ignore[method-assign]
    torch.tensor = on_cpu  # type: ignore[assignment]


def wrapped(args: argparse.Namespace, bucket: int) -> list[Any]:
    """The virtual stages of this rank, bf16, their parameters in buffers."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    virtual = args.virtual_pipeline_model_parallel_size
    stages = [{"ignore_virtual": False, "vp_stage": n} for n in range(virtual or 1)]
    models = [
        core.model_of(
            args,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=stage["vp_stage"] if virtual else None,
        ).bfloat16()
        for stage in stages
    ]
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        grad_reduce_in_fp32=True,
        bucket_size=bucket,
    )
    return [
        DistributedDataParallel(model.config, options, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]


def named(models: list[Any], table: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    """Parameters of which this data-parallel rank keeps some, by virtual stage and name."""
    for number, model in enumerate(models):
        for name, parameter in model.module.named_parameters():
            if parameter in table:
                yield (number, name), parameter


def optimizer_of(models: list[Any]) -> Any:
    """Megatron's own, its states random."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    (optimizer,) = get_megatron_optimizer(options, models).chained_optimizers
    data = dist.get_rank(models[0].dp_cp_group)
    ours = (parallel_state.get_pipeline_model_parallel_rank(), data)
    tensor = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named(models, optimizer.model_param_group_index_map):
        # What tensor ranks hold alike has the same states on all of them.
        cut = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator().manual_seed(
            crc32(repr((ours, name, cut and tensor)).encode())
        )
        group, number = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][number]
        main.data = torch.randn(main.shape, generator=generator)
        moments = {kind: torch.randn(main.shape, generator=generator) for kind in KINDS[1:]}
        optimizer.optimizer.state[main] = {"step": torch.tensor(98.0), **moments}
    return optimizer


def kept(models: list[Any], optimizer: Any) -> dict[tuple[int, str], Any]:
    """First, end and values of each parameter, by virtual stage and name."""
    found = {}
    for name, parameter in named(models, optimizer.model_param_gbuf_map):
        part = optimizer._get_model_param_range_map(parameter)["param"]
        states = optimizer._get_main_param_and_optimizer_states(parameter)
        values = {kind: states[kind].detach().clone() for kind in KINDS}
        found[name] = (part.start, part.end, values)
    return found


def main(words: list[str]) -> None:
    """See above."""
    from megatron.core import dist_checkpointing

    rank, args = int(words[0]), argparse.Namespace(**json.loads(Path(words[1]).read_text()))
    root, out = Path(words[3]), Path(words[4])
    begin(out, rank, args)
    models = wrapped(args, int(words[2]))
    optimizer = optimizer_of(models)
    optimizer._copy_main_params_to_model_params()
    for bucket in (bucket for model in models for bucket in model.bucket_groups):
        bucket.start_param_sync(force_sync=True)
    torch.save(kept(models, optimizer), out / f"{rank}.pt")
    folder = root / "iter_0000100"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    weights = {
        f"model{number if len(models) > 1 else ''}": model.module.sharded_state_dict()
        for number, model in enumerate(models)
    }
    tree = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "content_metadata": metadata,
        **weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
    }
    dist_checkpointing.save(tree, str(folder))
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
