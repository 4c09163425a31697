"""Megatron core's T5 itself, on a CPU: what it computes from a checkpoint in `torch` format.

    python megatron_t5_program.py FOLDER BATCH OUT

BATCH: text_enc, text_dec and enc_mask of a batch. A program of its own, as megatron_core_program.py
beside it."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_core_program import begin  # type: ignore[import-not-found]
from torch import Tensor


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    """The model that pretrain_t5.py builds of these args, with the local layer."""
    from megatron.core.models.T5 import T5Model, t5_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    t5_spec.TENorm = WrappedTorchNorm  # the block of local layers asks for it by this name
    given = vars(args)
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in given.items() if name in fields and value is not None}
    values |= {
        "layernorm_epsilon": args.norm_epsilon,
        "bias_activation_fusion": args.bias_gelu_fusion,
        "num_query_groups": None,
        "num_moe_experts": None,
        "persist_layer_norm": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    config = TransformerConfig(**values)
    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers
    return T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(
            args.encoder_num_layers
        ),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(
            args.num_layers
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    ).eval()


def logits(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[batch, decoder, vocabulary]. Masks say which keys a token does not see."""
    hidden = (batch["enc_mask"] < 0.5)[:, None, None, :]
    s_e, s_d = batch["text_enc"].shape[1], batch["text_dec"].shape[1]
    later = torch.ones(s_d, s_d, dtype=torch.bool).triu(1)[None, None]
    masks = (hidden.expand(-1, 1, s_e, s_e), later, hidden.expand(-1, 1, s_d, s_e))
    with torch.no_grad():
        return model(batch["text_enc"], batch["text_dec"], *masks)


def main(arguments: list[str]) -> None:
    """See above."""
    folder, given, out = (Path(word) for word in arguments)
    begin(out.parent)
    (path,) = folder.rglob("model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    model = model_of(tree["args"])
    model.load_state_dict(tree["model"], strict=True)
    torch.save(logits(model, torch.load(given)), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
