"""Megatron-LM itself, on a CPU: its own parser, `save_checkpoint` and `load_checkpoint`, for the
releases whose package holds its training code (core 0.17 and later).

    python megatron_training_program.py parse OUT WORDS...    args as the parser leaves them
    python megatron_training_program.py save OUT WORDS...     a checkpoint of iteration 100
    python megatron_training_program.py load OUT WORDS...     what it loads

WORDS: of its command line; --save or --load say where. OUT: gets {"args": those that are numbers,
text or null, "weights", "logits", "gradients", "iteration", "tokens"}; of `parse` the
pickled args, all of them."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import megatron_core_program as core
import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor

TOKENS = (2, 8)

PLAIN = (bool, int, float, str, type(None))


def begin(folder: str) -> None:
    from megatron.core import parallel_state

    store = dist.FileStore(str(Path(folder) / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    core.without_gpu()
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors, wherever they were to be."""
    return lambda *values, **options: make(*values, **{**options, "device": core.CPU})


def parsed(words: list[str]) -> argparse.Namespace:
    """As its `initialize_megatron` does."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables

    sys.argv = ["pretrain_gpt.py", *words]
    args: argparse.Namespace = parse_args()
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args)
    validate_args(args)
    set_global_variables(args)
    return args


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    """Its configuration comes from its own reading of the args."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
    ).eval()


def trained(model: torch.nn.Module) -> tuple[Any, Any]:
    """Its optimizer after a step on drawn gradients, and its schedules."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.training.training import get_optimizer_param_scheduler

    options = DistributedDataParallelConfig(use_distributed_optimizer=False)
    wrapped = DistributedDataParallel(model.config, options, model)
    plain = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(plain, [wrapped])
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.main_grad.copy_(grad)  # type: ignore[union-attr]
    optimizer.step()
    scheduler = get_optimizer_param_scheduler(optimizer)
    scheduler.step(100)
    return optimizer, scheduler


def draw(model: torch.nn.Module) -> None:
    """Weights of which none is 0 or 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def main(words: list[str]) -> None:
    """See above."""
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    what, out, *rest = words
    args = parsed(rest)
    if what == "parse":
        Path(out).write_bytes(pickle.dumps(args, protocol=2))
        return
    with TemporaryDirectory() as folder:
        begin(folder)
        model = model_of(args)
        iteration = 100
        if what == "save":
            draw(model)
            optimizer, scheduler = trained(model)
            args.consumed_train_samples = 6400
            save_checkpoint(iteration, [model], optimizer, scheduler, 0)
        else:
            iteration, _ = load_checkpoint([model], None, None)
        tokens = torch.randint(0, 30, TOKENS, generator=torch.Generator().manual_seed(0))
        plain_args = {name: value for name, value in vars(args).items() if type(value) in PLAIN}
        weights = {n: p.detach() for n, p in model.named_parameters()}
        found = {"args": plain_args, "weights": weights, "iteration": iteration, "tokens": tokens}
        found["logits"] = core.logits(model, tokens)
        other = model_of(args)  # the hooks of a training take the gradients away
        other.load_state_dict(model.state_dict())
        torch.save({**found, "gradients": core.gradients(other, tokens)}, out)
        dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(typing, "override"):  # it is of Python 3.12, and runs in 3.11 but for this name
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    main(sys.argv[1:])
