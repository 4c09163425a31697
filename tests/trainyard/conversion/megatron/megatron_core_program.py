"""Megatron core itself, on a CPU: what it computes from a checkpoint, and a checkpoint of its own.

    python megatron_core_program.py load FORMAT FOLDER TOKENS OUT
    python megatron_core_program.py save ARGS FOLDER TOKENS OUT

A program of its own, since it needs megatron-core, which patches much of torch, and takes the place
of a GPU from it. The model is built of the `args` in the checkpoint, as Megatron-LM does with
--use-checkpoint-args: by the names of TransformerConfig, and the few that it calls otherwise. ARGS:
a table in JSON, or pickled args of Megatron-LM's parser (.pkl). `save` puts the weights beside OUT,
in weights.pt."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


def without_gpu() -> None:
    """What megatron-core asks of a GPU is done by the CPU. No numbers are drawn: dropout is 0."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = lambda *a, **k: None  # type: ignore[assignment]
    Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    fork = contextlib.contextmanager(lambda *a, **k: iter([None]))
    random.CudaRNGStatesTracker.fork = lambda self, *a, **k: fork()


def begin(folder: Path) -> None:
    from megatron.core import parallel_state

    store = dist.FileStore(str(folder / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    without_gpu()


def model_of(args: argparse.Namespace, **parts: Any) -> torch.nn.Module:
    """parts: pre_process, post_process and vp_stage, of a stage that is not the whole model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    given = vars(args)
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in given.items() if name in fields and value is not None}
    values |= {
        "layernorm_epsilon": given.get("norm_epsilon", given.get("layernorm_epsilon")),
        "gated_linear_unit": args.swiglu,
        "activation_func": torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        "bias_activation_fusion": args.bias_gelu_fusion and not args.swiglu,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "num_moe_experts": args.num_experts,
        "persist_layer_norm": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    return GPTModel(
        config=TransformerConfig(**values),
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **parts,
    ).eval()


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """[batch, sequence, vocabulary], fp32."""
    with torch.no_grad():
        return model(tokens, *_places(tokens))


def gradients(model: torch.nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Of the mean loss where every token is to be followed by itself, by parameter."""
    model(tokens, *_places(tokens), labels=tokens).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _places(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions, and which of them a token does not see."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return torch.arange(length).expand_as(tokens), hidden


# --- reading --------------------------------------------------------------------------------------


def load(kind: str, folder: Path) -> torch.nn.Module:
    """The model of a folder of an iteration, as Megatron-LM fills it: strictly."""
    if kind == "torch":
        (path,) = folder.rglob("model_optim_rng.pt")
        tree = torch.load(path, weights_only=False)
        model = model_of(tree["args"])
        model.load_state_dict(tree["model"], strict=True)
        return model
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    common = dist_checkpointing.load_common_state_dict(str(folder))
    model = model_of(common["args"])
    wanted = {"model": model.sharded_state_dict()}
    tree, unasked, lacking = dist_checkpointing.load(
        wanted, str(folder), strict=StrictHandling.RETURN_ALL
    )
    others = {key for key in unasked if not key.startswith("optimizer.")}
    # Transformer Engine's norms have a state, which those of torch do not ask for.
    others = {key for key in others if not key.endswith("norm._extra_state")}
    assert lacking | others == set()
    model.load_state_dict(tree["model"], strict=True)
    return model


# --- writing --------------------------------------------------------------------------------------


def save(root: Path, args: argparse.Namespace) -> torch.nn.Module:
    """Random weights, none of them 0 or 1, written by megatron-core's own save."""
    from megatron.core import dist_checkpointing

    model = model_of(args)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    folder = root / "iter_0000100"
    folder.mkdir(parents=True)
    tree = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": model.sharded_state_dict(),
    }
    dist_checkpointing.save(tree, str(folder))
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return model


def args_in(path: Path) -> argparse.Namespace:
    if path.suffix == ".json":
        return argparse.Namespace(**json.loads(path.read_text()))
    args: argparse.Namespace = pickle.loads(path.read_bytes())
    return args


def main(arguments: list[str]) -> None:
    """See above."""
    what, *words = arguments
    out = Path(words[-1])
    begin(out.parent)
    tokens = torch.load(words[-2])
    if what == "load":
        model = load(words[0], Path(words[1]))
    else:
        model = save(Path(words[1]), args_in(Path(words[0])))
        torch.save(dict(model.named_parameters()), out.with_name("weights.pt"))
    torch.save(logits(model, tokens), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
