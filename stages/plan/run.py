"""Plans a run: a JSON document, and the report that users of Megatron-LM know."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from stages.plan.config import PlanConfig
from stages.plan.fit import (
    GIBIBYTE,
    activations_of,
    check_fit,
    detail_of,
    memory_bytes,
    parameter_bytes,
)
from stages.plan.inference import inference_document, inference_lines
from stages.plan.pipeline_schedule import pipeline_document, pipeline_lines, pipeline_picture
from stages.plan.vocabulary import with_vocabulary
from stages.runtime.context import StageRun
from trainyard.models.costs.memory import (
    ActivationMemory,
    ParameterCount,
    count_parameters,
    full_recompute_bytes,
)
from trainyard.models.families import family_of
from trainyard.models.parallel_layout import MAIN_BYTES

FORMAT_VERSION = 1
MEGABYTE = 2**20
UNITS = ((10**9, "billions"), (10**6, "millions"), (10**3, "thousands"), (1, "units"))
"""Of parameters; a tenth of one is the least that two digits tell."""
SHARDED = {
    "no_shard": [],
    "optim": ["distributed optimizer"],
    "optim_grads": ["optimizer and gradients sharded"],
    "optim_grads_params": ["optimizer, gradients and weights sharded"],
}
"""What replicas shard, for the printed plan."""


def run(config: PlanConfig, stage: StageRun) -> dict[str, Any]:
    """Print the plan; with --output-dir, write plan.json and schedule.svg."""
    config = with_vocabulary(config)
    check_fit(config)
    document = plan(config)
    print(json.dumps(document, indent=1) if config.json else report(config))
    if stage.output is not None:
        stage.write_json("plan.json", document)
        if config.show_schedule:
            stage.write_text("schedule.svg", pipeline_picture(config))
    return {"num_parameters": document["parameters"]["exact"]}


def plan(config: PlanConfig) -> dict[str, Any]:
    """Counts, FLOPs and memory of the run; memory of its most loaded device."""
    model, vocab, layout = config.model, config.rows, config.layout()
    counts = count_parameters(model, vocab, layout)
    full = layout.recompute == "full"
    recomputed = full_recompute_bytes(model, vocab, layout) / layout.cp if full else None
    detail = detail_of(config)
    each = parameter_bytes(config)
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
        "flops_per_iteration": flops_of_samples(config, config.global_batch),
        "flops_per_token": flops_of_samples(config, 1) / model.seq_length,
        "memory_bytes": memory_bytes(config),
        "bytes_per_parameter": {
            "parameter": each.weight,
            "gradient": each.gradient,
            "optimizer": each.state,
        },
        "memory_detail_bytes": detail and {**asdict(detail), "total": detail.total},
        "activations_with_full_recompute_bytes": recomputed,
        "inference": inference_document(config),
        "checkpoint_bytes": exact_parameters(config) * (MAIN_BYTES + layout.moment_bytes),
    }
    if config.show_schedule:
        document["pipeline"] = pipeline_document(config)
    return document


def flops_of_samples(config: PlanConfig, count: int) -> float:
    """Operations of a step of this many samples, by the convention of the model's family."""
    model, vocab = config.model, config.rows
    return family_of(model).flops_per_iteration(model, vocab, count)


def exact_parameters(config: PlanConfig) -> int:
    """Number of trained parameters, with biases and learned positions."""
    return config.model.num_params(config.rows)


# --- the report -------------------------------------------------------------------------------


def report(config: PlanConfig) -> str:
    """The lines of the upstream report, then the lines of trainyard."""
    document = plan(config)
    model, vocab, layout = config.model, config.rows, config.layout()
    counts = count_parameters(model, vocab, layout)
    return "\n".join(
        [
            *parameter_lines(counts, config.model.experts.enabled),
            *activation_lines(activations_of(config)),
            memory_line(document["memory_bytes"]),
            "",
            layout_line(config),
            *more_lines(document),
            *detail_lines(config),
            *inference_lines(config),
            *(["", *pipeline_lines(config)] if config.show_schedule else []),
        ]
    )


def parameter_lines(counts: ParameterCount, has_experts: bool) -> list[str]:
    """Counts in billions, or less if small. The first line has two blanks, as upstream."""
    total = counts.transformer_block + counts.embedding
    unit, name = next(pair for pair in UNITS if total >= pair[0] / 10 or pair[0] == 1)
    block, embedding = counts.transformer_block / unit, counts.embedding / unit
    lines = [
        f"Number of parameters in transformer block in {name}:  {block:.2f}",
        f"Number of parameters in embedding layers in {name}: {embedding:.2f}",
        f"Total number of parameters in {name}: {total / unit:.2f}",
    ]
    if has_experts:
        active = counts.active_transformer_block / unit
        lines.insert(1, f"Number of active parameters in transformer block in {name}: {active:.2f}")
        lines.append(f"Total number of active parameters in {name}: {active + embedding:.2f}")
    shard = counts.most_loaded_shard / unit
    lines.append(f"Number of parameters in most loaded shard in {name}: {shard:.4f}")
    if counts.other_shards is not None:
        others = counts.other_shards / unit
        lines.append(f"Number of parameters in other shards in {name}: {others:.4f}")
    return lines


def activation_lines(activations: ActivationMemory) -> list[str]:
    """Activations of a layer, and the effect of the pipeline schedule."""
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
    """The sum that must fit in a device."""
    activation, total = memory["activations"] / MEGABYTE, memory["total"] / MEGABYTE
    return (
        f"Theoretical memory footprints: weight and optimizer={total - activation:.2f} MB, "
        f"activation={activation:.2f} MB, total={total:.2f} MB"
    )


def layout_line(config: PlanConfig) -> str:
    """The number of devices by kind of parallelism."""
    degrees = {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "data": config.replicas,
    }
    product = " x ".join(f"{size} {name}" for name, size in degrees.items())
    flags = ["sequence parallel"] if config.sequence_parallel else []
    flags += SHARDED[config.data_parallel().sharding]
    instances = config.num_distributed_optimizer_instances
    flags += [f"{instances} instances"] if instances > 1 else []
    batches = f"{config.num_microbatches} x {config.micro_batch_size} samples a replica and step"
    return f"Devices: {config.num_devices} = {'; '.join([f'{product} parallel', *flags, batches])}"


def detail_lines(config: PlanConfig) -> list[str]:
    """Memory tensor by tensor, as trainyard allocates it."""
    detail = detail_of(config)
    if detail is None:
        return []
    kinds = ("parameters", "gradients", "optimizer", "activations", "logits")
    unit, name = (GIBIBYTE, "GiB") if detail.total >= GIBIBYTE / 10 else (MEGABYTE, "MB")
    parts = [f"{kind} {getattr(detail, kind) / unit:.2f}" for kind in kinds]
    named = detail.stage in ("first", "last")
    stage = f" of the {detail.stage} stage" if named else f" of stage {detail.stage}"
    where = "" if detail.stage == "only" else stage
    return [
        f"Memory of a device{where}, tensor by tensor, without workspaces: "
        f"{detail.total / unit:.2f} {name}",
        f"  {' + '.join(parts)}",
    ]


def more_lines(document: dict[str, Any]) -> list[str]:
    """Facts that the upstream report lacks."""
    checkpoint = document["checkpoint_bytes"] / MEGABYTE
    lines = [
        f"Parameters, every one counted: {document['parameters']['exact']:,}",
        f"Tokens per iteration: {document['tokens_per_iteration']:,}",
        f"FLOPs per iteration: {document['flops_per_iteration']:.6e}",
        f"FLOPs per token: {document['flops_per_token']:.6e}",
        f"Checkpoint (fp32 weights and moments): {checkpoint:,.2f} MB",
    ]
    recomputed = document["activations_with_full_recompute_bytes"]
    if recomputed is not None:
        lines.append(f"Activations with full recomputation: {recomputed / MEGABYTE:,.2f} MB")
    return lines
