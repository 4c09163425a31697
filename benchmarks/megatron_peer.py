"""Megatron-Core with Transformer Engine, a peer of `benchmarks.train`.

    pip install megatron-core==0.19.2 transformer-engine[pytorch]
    python -m benchmarks.megatron_peer llama-8b-half --fp8-format hybrid
    torchrun --nproc-per-node 2 -m benchmarks.megatron_peer llama-8b-half --layout tp2

Its GPT model with Transformer Engine's layers, its schedule, gradient buffers and optimizer, with
the fusions that its training scripts turn on; random tokens that never leave the GPU. Without apex
there is no fused sum of weight gradients. Prints one JSON line."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.energy import joules
from benchmarks.shapes import SHAPES, Shape, share_of_peak

LAYOUTS = {
    "": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "ep2": {"expert_model_parallel_size": 2},
}


def configuration(shape: Shape, layout: str, fp8: str | None, recipe: str) -> Any:
    """Its TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.topk,
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        add_bias_linear=not shape.llama,
        gated_linear_unit=shape.llama,
        activation_func=torch.nn.functional.silu if shape.llama else torch.nn.functional.gelu,
        normalization="RMSNorm" if shape.llama else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        sequence_parallel=layout == "tp2",
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        apply_rope_fusion=shape.llama,
        persist_layer_norm=True,
        cross_entropy_loss_fusion=True,
        fp8=fp8,
        fp8_recipe=recipe,
        **({"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"} if fp8 else {}),
        **LAYOUTS[layout],
        **experts,
    )


def build(shape: Shape, config: Any) -> tuple[Any, Any]:
    """The model within its gradient buffers, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = parallel_state.get_data_parallel_world_size() > 1
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(shape.experts or None, bool(shape.experts)),
        vocab_size=shape.vocab,
        max_sequence_length=shape.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not shape.untied,
        position_embedding_type="rope" if shape.llama else "learned_absolute",
        rotary_base=500_000,
    ).cuda()
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=sharded,
            overlap_param_gather=sharded,
            use_distributed_optimizer=sharded,
        ),
        model.bfloat16(),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            adam_beta2=0.95,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=sharded,
            overlap_param_gather=sharded,
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = wrapped.no_sync if sharded else None
    return wrapped, optimizer


def random_tokens(shape: Shape, context_ranks: int) -> Iterator[Tensor]:
    """(b, s / ranks + 1) without end."""
    length = shape.seq // context_ranks + 1
    while True:
        yield torch.randint(0, shape.vocab, (shape.mbs, length), device="cuda")


def forward_step(shape: Shape, ranks: int, batches: Iterator[Tensor], model: Any) -> Any:
    """The output of a micro-batch, and how to make the mean loss of it."""
    tokens = next(batches)
    length = shape.seq // ranks
    positions = torch.arange(length, device="cuda").expand(shape.mbs, -1)
    output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())

    def loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


def run(shape: Shape, layout: str, steps: int, warmup: int, accumulate: int, config: Any) -> Any:
    """Median step time and what follows from it, per GPU."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer = build(shape, config)
    ranks = parallel_state.get_context_parallel_world_size()
    batches, step_of = random_tokens(shape, ranks), partial(forward_step, shape, ranks)
    schedule, times, begin = get_forward_backward_func(), [], math.nan
    for step in range(warmup + steps):
        torch.cuda.synchronize()
        if step == warmup:
            begin = joules()
        began = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=step_of,
            data_iterator=batches,
            model=[model],
            num_microbatches=accumulate,
            seq_length=shape.seq,
            micro_batch_size=shape.mbs,
        )
        optimizer.step()
        torch.cuda.synchronize()
        if step >= warmup:
            times.append(time.perf_counter() - began)
    gpus = torch.distributed.get_world_size()
    replicas = parallel_state.get_data_parallel_world_size()
    tokens = shape.mbs * accumulate * shape.seq * replicas / gpus
    rate = tokens / statistics.median(times)
    return {
        "name": shape.name,
        "tokens_per_second": rate,
        "mfu": share_of_peak(shape, rate),
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "joules_per_token": (joules() - begin) / (tokens * steps),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [name for name, shape in SHAPES.items() if not shape.state]
    parser.add_argument("shape", choices=names)
    parser.add_argument("--layout", choices=LAYOUTS, default="")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"))
    parser.add_argument("--fp8-recipe", default="tensorwise")
    args = parser.parse_args()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(**LAYOUTS[args.layout])
    model_parallel_cuda_manual_seed(1)
    shape = SHAPES[args.shape]
    config = configuration(shape, args.layout, args.fp8_format, args.fp8_recipe)
    found = run(shape, args.layout, args.steps, args.warmup, args.accumulate, config)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
