"""The plan as a document, and as the report that users of Megatron-LM know."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from stages.plan.config import PlanConfig
from stages.plan.fit import check_fit
from stages.plan.schedule import pipeline_document, pipeline_lines, pipeline_picture
from stages.runtime.context import StageRun
from trainyard.models.gpt.flops import flops_per_iteration, flops_per_token
from trainyard.models.gpt.memory import (
    ActivationMemory,
    ParameterCount,
    activation_memory,
    count_parameters,
    full_recompute_bytes,
)
from trainyard.models.gpt.memory_detail import DetailedMemory, detailed_memory
from trainyard.models.layout import (
    GRADIENT_BYTES,
    PARAMETER_BYTES,
)

FORMAT_VERSION = 1
MEGABYTE = 2**20
GIBIBYTE = 2**30
BILLION = 10**9
CHECKPOINT_BYTES = 12
"""fp32 weight and two Adam moments of each parameter."""


def run(config: PlanConfig, stage: StageRun) -> dict[str, Any]:
    """Print the plan, and write plan.json where an output was asked for."""
    check_fit(config)
    document = plan(config)
    print(json.dumps(document, indent=1) if config.json else report(config))
    if stage.output is not None:
        stage.write_json("plan.json", document)
        if config.show_schedule:
            stage.write_text("schedule.svg", pipeline_picture(config))
    return {"num_parameters": document["parameters"]["exact"]}


def plan(config: PlanConfig) -> dict[str, Any]:
    """Everything that is known of the run before it exists; memory on the most loaded device."""
    model, vocab, layout = config.model, config.padded_vocab_size, config.layout()
    counts = count_parameters(model, vocab, layout, config.moe)
    shard, optimizer = counts.most_loaded_shard, optimizer_bytes(config)
    memory: dict[str, float | None] = {
        "parameters": shard * PARAMETER_BYTES,
        "gradients": shard * GRADIENT_BYTES,
        "optimizer": shard * optimizer,
        "activations": activations_of(config).total,
    }
    memory["total"] = sum(value for value in memory.values() if value is not None)
    full = layout.recompute == "full"
    recomputed = full_recompute_bytes(model, vocab, layout) / layout.cp if full else None
    detail = detail_of(config)
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "parameters": {
            "exact": exact_parameters(config),
            "transformer_block": counts.transformer_block,
            "active_transformer_block": counts.active_transformer_block,
            "embedding_layers": counts.embedding,
            "most_loaded_shard": counts.most_loaded_shard,
            "other_shards": counts.other_shards,
        },
        "padded_vocab_size": vocab,
        "data_parallel_size": layout.dp,
        "num_devices": config.num_devices,
        "num_microbatches": config.num_microbatches,
        "tokens_per_iteration": config.global_batch * model.seq_length,
        "flops_per_iteration": flops_per_iteration(model, vocab, config.global_batch, config.moe),
        "flops_per_token": flops_per_token(model, vocab, config.moe),
        "memory_bytes": memory,
        "bytes_per_parameter": {
            "parameter": PARAMETER_BYTES,
            "gradient": GRADIENT_BYTES,
            "optimizer": optimizer,
        },
        "memory_detail_bytes": detail and {**asdict(detail), "total": detail.total},
        "activations_with_full_recompute_bytes": recomputed,
        "checkpoint_bytes": exact_parameters(config) * CHECKPOINT_BYTES,
    }
    if config.show_schedule:
        document["pipeline"] = pipeline_document(config)
    return document


def optimizer_bytes(config: PlanConfig) -> float:
    """Of a parameter, on a device; ranks that share a sequence hold the same weights, too, so ZeRO
    spreads over them."""
    layout = config.layout()
    return replace(layout, dp=layout.dp * layout.cp).optimizer_bytes_per_parameter


def activations_of(config: PlanConfig) -> ActivationMemory:
    """By the upstream formulas, which do not know context parallelism: a device has its part of
    every sequence."""
    whole = activation_memory(config.model, config.padded_vocab_size, config.layout())
    cp = config.context_parallel_size
    return replace(whole, per_layer=whole.per_layer / cp, total=whole.total / cp)


def detail_of(config: PlanConfig) -> DetailedMemory | None:
    """What this project spends; its formulas know no experts."""
    if config.moe.enabled:
        return None
    return detailed_memory(config.model, config.padded_vocab_size, config.layout())


def exact_parameters(config: PlanConfig) -> int:
    """Every trained number, biases and learned positions included.

    Experts have no biases of their own in the count."""
    dense = config.model.num_params(config.padded_vocab_size)
    if not config.moe.enabled:
        return dense
    layout = config.layout()
    with_experts = count_parameters(config.model, config.padded_vocab_size, layout, config.moe)
    without = count_parameters(config.model, config.padded_vocab_size, layout)
    return dense + with_experts.transformer_block - without.transformer_block


# --- the report -------------------------------------------------------------------------------


def report(config: PlanConfig) -> str:
    """The upstream report line by line, then a few lines of ours."""
    document = plan(config)
    model, vocab, layout = config.model, config.padded_vocab_size, config.layout()
    counts = count_parameters(model, vocab, layout, config.moe)
    return "\n".join(
        [
            *parameter_lines(counts, config.moe.enabled),
            *activation_lines(activations_of(config)),
            memory_line(document["memory_bytes"]),
            "",
            cut_line(config),
            *our_lines(document),
            *detail_lines(config),
            *(["", *pipeline_lines(config)] if config.show_schedule else []),
        ]
    )


def parameter_lines(counts: ParameterCount, has_experts: bool) -> list[str]:
    """Counts in billions; the first line has two blanks, as it always had."""
    block, embedding = counts.transformer_block / BILLION, counts.embedding / BILLION
    lines = [
        f"Number of parameters in transformer block in billions:  {block:.2f}",
        f"Number of parameters in embedding layers in billions: {embedding:.2f}",
        f"Total number of parameters in billions: {block + embedding:.2f}",
    ]
    if has_experts:
        active = counts.active_transformer_block / BILLION
        lines.insert(
            1, f"Number of active parameters in transformer block in billions: {active:.2f}"
        )
        lines.append(f"Total number of active parameters in billions: {active + embedding:.2f}")
    shard = counts.most_loaded_shard / BILLION
    lines.append(f"Number of parameters in most loaded shard in billions: {shard:.4f}")
    if counts.other_shards is not None:
        others = counts.other_shards / BILLION
        lines.append(f"Number of parameters in other shards in billions: {others:.4f}")
    return lines


def activation_lines(activations: ActivationMemory) -> list[str]:
    """Per layer, and what the pipeline schedule does to it."""
    kind = "" if activations.with_sequence_parallel else " (precise, without SP)"
    per_layer = activations.per_layer / MEGABYTE
    lines = [f"Activation memory footprint per transformer layer{kind}: {per_layer:.1f} MB"]
    if activations.interleaved_penalty is not None:
        penalty = activations.interleaved_penalty
        lines.append(f"Memory penalty from interleaved schedule: {penalty:.2f}")
    if activations.in_flight_microbatches is not None:
        lines.append(f"Number of in-flight microbatches: {activations.in_flight_microbatches}")
    return lines


def memory_line(memory: dict[str, float]) -> str:
    """The sum that decides whether it fits."""
    activation, total = memory["activations"] / MEGABYTE, memory["total"] / MEGABYTE
    return (
        f"Theoretical memory footprints: weight and optimizer={total - activation:.2f} MB, "
        f"activation={activation:.2f} MB, total={total:.2f} MB"
    )


def cut_line(config: PlanConfig) -> str:
    """How many devices do what."""
    degrees = {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "data": config.replicas,
    }
    product = " x ".join(f"{size} {name}" for name, size in degrees.items())
    with_ = ["sequence parallel"] if config.sequence_parallel else []
    with_ += ["distributed optimizer"] if config.use_distributed_optimizer else []
    batches = f"{config.num_microbatches} x {config.micro_batch_size} samples a replica and step"
    return f"Devices: {config.num_devices} = {'; '.join([f'{product} parallel', *with_, batches])}"


def detail_lines(config: PlanConfig) -> list[str]:
    """Memory kind by kind as it is spent here."""
    detail = detail_of(config)
    if detail is None:
        return []
    kinds = ("parameters", "gradients", "optimizer", "activations", "logits")
    parts = [f"{kind} {getattr(detail, kind) / GIBIBYTE:.2f}" for kind in kinds]
    where = "" if detail.stage == "only" else f" of the {detail.stage} stage"
    return [
        f"Memory of a device{where}, tensor by tensor, without workspaces: "
        f"{detail.total / GIBIBYTE:.2f} GiB",
        f"  {' + '.join(parts)}",
    ]


def our_lines(document: dict[str, Any]) -> list[str]:
    """What the upstream report leaves out."""
    checkpoint = document["checkpoint_bytes"] / MEGABYTE
    lines = [
        f"Parameters, every one counted: {document['parameters']['exact']:,}",
        f"Tokens per iteration: {document['tokens_per_iteration']:,}",
        f"FLOPs per iteration: {document['flops_per_iteration']:.6e}",
        f"FLOPs per token: {document['flops_per_token']:.6e}",
        f"Checkpoint (fp32 weights and Adam moments): {checkpoint:,.2f} MB",
    ]
    recomputed = document["activations_with_full_recompute_bytes"]
    if recomputed is not None:
        lines.append(f"Activations with full recomputation: {recomputed / MEGABYTE:,.2f} MB")
    return lines
