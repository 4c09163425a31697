"""Models of Megatron core of every family, with Transformer Engine's layers, on a CPU.

    python megatron_family_program.py ROOT

Of every folder KIND below ROOT, where made/ is a checkpoint in `torch_dist` and batch.pt a batch:
builds the model of its args, writes keys and shapes of its sharded_state_dict to listed.json, and
loads the checkpoint strictly, with logits and state dict to loaded.pt. Then perturbs the weights,
saves them to theirs/ and their logits to saved.pt. A program of its own, as
megatron_core_program.py beside it. Layers are those of Transformer Engine, by `engine_stand_in`,
unless the args say transformer_impl local."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_stand_in  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from megatron_core_program import begin  # type: ignore[import-not-found]
from torch import Tensor

OFTEN = {
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "use_mamba_mem_eff_path": False,
    "sequence_parallel": False,
}


# --- models, as Megatron-LM's programs build them -------------------------------------------------


def config_of(args: argparse.Namespace) -> Any:
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    given = vars(args)
    is_latent = bool(given.get("multi_latent_attention"))
    kind = MLATransformerConfig if is_latent else TransformerConfig
    if given.get("retro_add_retriever"):
        from megatron.core.models.retro import RetroConfig

        kind = RetroConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in given.items() if name in fields and value is not None}
    gated = args.swiglu or args.quick_geglu
    activation = torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu
    activation = quick_gelu if args.quick_geglu else activation
    activation = squared_relu if args.squared_relu else activation
    if is_latent:
        values["q_lora_rank"] = args.q_lora_rank
    if given.get("retro_add_retriever"):
        values["retro_split_preprocessing"] = "98,2,0"  # it asks for one, and for these
        os.environ.update({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"})
    values |= {
        "layernorm_epsilon": given.get("norm_epsilon", given.get("layernorm_epsilon")),
        "gated_linear_unit": gated,
        "activation_func": activation,
        "bias_activation_fusion": (
            args.bias_gelu_fusion and args.add_bias_linear and not (gated or args.squared_relu)
        ),
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "num_moe_experts": args.num_experts,
        "fp32_residual_connection": False,
        **OFTEN,
    }
    if given.get("window_size") is not None:
        values["window_size"] = tuple(args.window_size)
    return kind(**values)


def common(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
    }


def gpt(args: argparse.Namespace, config: Any) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    engine = args.transformer_impl == "transformer_engine"
    if config.num_moe_experts:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=engine,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
        )
    elif engine:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=args.qk_layernorm, multi_latent_attention=config.multi_latent_attention
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    mtp = None
    if args.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=engine)
    rope = {"rotary_percent": args.rotary_percent, "rotary_base": args.rotary_base}
    return GPTModel(
        config=config, transformer_layer_spec=spec, mtp_block_spec=mtp, **common(args), **rope
    )


def bert(args: argparse.Namespace, config: Any) -> torch.nn.Module:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel

    spec = bert_layer_specs.bert_layer_local_spec
    if args.transformer_impl == "transformer_engine":
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    return BertModel(
        config=config,
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=spec,
        add_binary_head=args.bert_binary_head,
        **common(args),
    )


def t5(args: argparse.Namespace, config: Any) -> torch.nn.Module:
    from megatron.core.models.T5 import T5Model, t5_spec

    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_transformer_engine_block_spec(
            args.encoder_num_layers
        ),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_transformer_engine_block_spec(
            args.num_layers
        ),
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        **common(args),
    )


def retro(args: argparse.Namespace, config: Any) -> torch.nn.Module:
    """As pretrain_retro.py builds it."""
    from megatron.core.models.retro import RetroModel, get_retro_decoder_block_spec

    engine = args.transformer_impl == "transformer_engine"
    rope = {"rotary_percent": args.rotary_percent, "rotary_base": args.rotary_base}
    return RetroModel(
        config=config,
        transformer_layer_spec=get_retro_decoder_block_spec(config, use_transformer_engine=engine),
        **common(args),
        **rope,
    )


def hybrid(args: argparse.Namespace, config: Any) -> torch.nn.Module:
    from megatron.core.models.mamba import MambaModel
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    return MambaModel(
        config=config,
        mamba_stack_spec=mamba_stack_spec,
        hybrid_override_pattern=args.hybrid_override_pattern,
        **common(args),
    )


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    given = vars(args)
    builds = {"hybrid_override_pattern": hybrid, "decoder_num_layers": t5, "bert_binary_head": bert}
    builds |= {"retro_add_retriever": retro}
    build = next((b for name, b in builds.items() if given.get(name) is not None), gpt)
    return build(args, config_of(args)).eval()


# --- what they compute ----------------------------------------------------------------------------


def logits(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[batch, sequence, vocabulary]; of a T5 the decoder's. Masks say what a token does not see."""
    kind, tokens = type(model).__name__, batch["tokens"]
    length = tokens.shape[1]
    with torch.no_grad():
        if kind == "BertModel":
            types = batch["types"] if model.add_binary_head else None
            return model(tokens, batch["mask"], types)[0]
        if kind == "T5Model":
            hidden = (batch["mask"] < 0.5)[:, None, None, :]
            decoder = batch["decoder_tokens"].shape[1]
            later = torch.ones(decoder, decoder, dtype=torch.bool).triu(1)[None, None]
            masks = (hidden.expand(-1, 1, length, -1), later, hidden.expand(-1, 1, decoder, -1))
            return model(tokens, batch["decoder_tokens"], *masks)
        places = torch.arange(length).expand_as(tokens)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        if kind == "RetroModel":  # whose neighbours are all whole
            rows = batch["neighbors"].flatten(0, 2)
            return model(tokens, places, later, rows, torch.arange(rows.shape[1]).expand_as(rows))
        with without_prediction(model):
            return model(tokens, places, later)


@contextlib.contextmanager
def without_prediction(model: torch.nn.Module) -> Iterator[None]:
    """Without the depths of multi-token prediction, which need labels."""
    depths, model.config.mtp_num_layers = model.config.mtp_num_layers, None
    processes, model.mtp_process = getattr(model, "mtp_process", False), False
    yield
    model.config.mtp_num_layers, model.mtp_process = depths, processes


# --- checkpoints ----------------------------------------------------------------------------------


def listed(model: torch.nn.Module) -> dict[str, Any]:
    """Shapes of its tensors by their keys, and names of its objects."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    tree = model.sharded_state_dict()
    apply_factories(tree)
    found = list(nested_values(tree))
    objects = {item.unique_key for item in found if isinstance(item, ShardedObject)}
    tensors = [item for item in found if not isinstance(item, ShardedObject)]
    shapes = {tensor.key: list(tensor.global_shape) for tensor in tensors}
    return {"tensors": dict(sorted(shapes.items())), "objects": sorted(objects)}


def load(model: torch.nn.Module, folder: Path, *, local: bool) -> None:
    """Fill it strictly: nothing is missing in the files, and nothing left over."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    tree, unasked, lacking = dist_checkpointing.load(
        {"model": model.sharded_state_dict()}, str(folder), strict=StrictHandling.RETURN_ALL
    )
    # Local norms do not ask for the states of those of Transformer Engine.
    left = {key for key in unasked if not (local and "_extra_state" in key)}
    assert (left, lacking) == (set(), set()), (left, lacking)
    model.load_state_dict(tree["model"], strict=True)


def save(model: torch.nn.Module, root: Path, args: argparse.Namespace) -> None:
    """Other weights than before, by megatron-core's own save."""
    from megatron.core import dist_checkpointing

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    folder = root / "iter_0000100"
    folder.mkdir(parents=True)
    tree = {"args": args, "checkpoint_version": 3.0, "iteration": 100}
    dist_checkpointing.save(tree | {"model": model.sharded_state_dict()}, str(folder))
    (root / "latest_checkpointed_iteration.txt").write_text("100")


def run(folder: Path) -> None:
    """Everything of one model."""
    from megatron.core import dist_checkpointing

    (made,) = (folder / "made").glob("iter_*")
    args = dist_checkpointing.load_common_state_dict(str(made))["args"]
    batch = torch.load(folder / "batch.pt")
    model = model_of(args)
    (folder / "listed.json").write_text(json.dumps(listed(model)))
    load(model, made, local=args.transformer_impl == "local")
    state = {name: t.clone() for name, t in model.state_dict().items() if "_extra" not in name}
    torch.save({"logits": logits(model, batch), "state": state}, folder / "loaded.pt")
    save(model, folder / "theirs", args)
    torch.save({"logits": logits(model, batch)}, folder / "saved.pt")


def main(arguments: list[str]) -> None:
    """See above."""
    root = Path(arguments[0])
    engine_stand_in.install()
    begin(root)
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        print(folder.name, flush=True)
        run(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
