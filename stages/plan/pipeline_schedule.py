"""The pipeline schedule of a run: layers of each rank, timeline, idle time."""

from __future__ import annotations

import shutil
from functools import lru_cache
from typing import Any

from stages.plan.config import PlanConfig
from trainyard.models.costs.flops import matmul_weights_per_token, output_weights_per_token
from trainyard.models.families import family_of
from trainyard.parallel.pipeline.partition import StageLayers
from trainyard.parallel.pipeline.schedule import Action, build_pipeline_schedule, choose_group_size
from trainyard.parallel.pipeline.simulate import Simulation, peak_in_flight, simulate
from trainyard.parallel.pipeline.timeline import WIDTH, legend, svg_timeline, text_timeline

BACKWARD_COST = {"none": 2.0, "selective": 2.0, "full": 3.0}
"""Cost of a backward pass in forward passes; recomputing only attention costs little."""


def pipeline_document(config: PlanConfig) -> dict[str, Any]:
    """Numbers of the schedule; times are in forward passes of a layer."""
    simulation = _simulation(config)
    return {
        "num_microbatches": config.num_microbatches,
        "virtual_stages": config.num_chunks,
        "microbatch_group_size": group_size(config),
        "bubble_even_stages": bubble_of_even_stages(config),
        "bubble": simulation.bubble,
        "step_duration": simulation.makespan,
        "ranks": [
            {
                "stages": [_stage_document(stage) for stage in stages],
                "idle": simulation.idle_share(rank),
                "peak_in_flight": peak_in_flight(simulation.schedule[rank]),
            }
            for rank, stages in enumerate(config.partition())
        ],
    }


def pipeline_lines(config: PlanConfig) -> list[str]:
    """The timeline as text, and the numbers of each rank."""
    simulation, document = _simulation(config), pipeline_document(config)
    lines = [
        f"Pipeline schedule: {title(config)}",
        legend(config.num_chunks),
        "",
        text_timeline(simulation, shutil.get_terminal_size((WIDTH, 24)).columns),
        "",
        f"Idle: {document['bubble']:.1%} of all ranks' time; stages of equal cost would idle "
        f"{document['bubble_even_stages']:.1%}",
    ]
    of_a_chunk = " of a chunk" if config.num_chunks > 1 else ""
    for rank, (stages, facts) in enumerate(zip(config.partition(), document["ranks"], strict=True)):
        layers = "; ".join(describe(stage) for stage in stages)
        lines.append(
            f"rank {rank}: {layers}; idle {facts['idle']:.1%}, activations of up to "
            f"{facts['peak_in_flight']} micro-batches{of_a_chunk}"
        )
    return lines


def pipeline_picture(config: PlanConfig) -> str:
    """The timeline as SVG."""
    return svg_timeline(_simulation(config), title(config))


def title(config: PlanConfig) -> str:
    """The name of the schedule, with its sizes."""
    pp, chunks = config.pipeline_model_parallel_size, config.num_chunks
    if pp == 1:
        return f"{config.num_microbatches} micro-batches, no pipeline"
    name = "1F1B" if chunks == 1 else "interleaved 1F1B"
    text = f"{name}, {pp} ranks, {config.num_microbatches} micro-batches"
    if chunks > 1:
        text += f", {chunks} chunks a rank, groups of {group_size(config)}"
    return text


def describe(stage: StageLayers) -> str:
    """`embedding, layers 0-3`."""
    parts = ["embedding"] if stage.has_embedding else []
    if stage.layers:
        first, last = stage.layers[0], stage.layers[-1]
        parts.append(f"layers {first}-{last}" if first < last else f"layer {first}")
    parts += ["output"] if stage.has_output else []
    return ", ".join(parts) or "no layers"


def group_size(config: PlanConfig) -> int | None:
    """Consecutive micro-batches of a chunk; None without chunks."""
    if config.num_chunks == 1:
        return None
    return choose_group_size(
        config.pipeline_model_parallel_size,
        config.num_microbatches,
        config.microbatch_group_size_per_virtual_pipeline_stage,
    )


def bubble_of_even_stages(config: PlanConfig) -> float:
    """(p - 1) / (v m + p - 1), arXiv:2104.04473: the idle share of a step with even stages."""
    pp, slots = config.pipeline_model_parallel_size, config.num_chunks * config.num_microbatches
    return (pp - 1) / (slots + pp - 1)


@lru_cache(maxsize=4)
def _simulation(config: PlanConfig) -> Simulation:
    """The schedule simulated, with the matrix products of each stage as its cost."""
    pp, chunks = config.pipeline_model_parallel_size, config.num_chunks
    pipeline_schedule = build_pipeline_schedule(
        pp, chunks, config.num_microbatches, group_size(config)
    )
    layer, output = _costs(config)
    forward = [
        [
            config.model.equal_layers(stage.layers) * layer + stage.has_output * output
            for stage in stages
        ]
        for stages in config.partition()
    ]
    backward = BACKWARD_COST[config.model.recompute]

    def cost(rank: int, action: Action) -> float:
        duration = forward[rank][action.chunk] / layer
        return duration if action.kind == "F" else duration * backward

    return simulate(pipeline_schedule, chunks, cost)


def _costs(config: PlanConfig) -> tuple[float, float]:
    """Matrix products of a token in a layer, and behind the last one; the embedding has none."""
    model = config.model
    output = output_weights_per_token(model, config.rows)
    weights = matmul_weights_per_token(model, config.rows) - output
    output = output * model.output_length // model.seq_length
    directions = 2 if family_of(model).of_sentences else 1
    attention = directions * model.seq_length * (model.query_size + model.context_size) // 2
    of_layer = weights / len(model.trained_layers) + attention
    return of_layer, output + (model.mtp.mtp_num_layers or 0) * of_layer


def _stage_document(stage: StageLayers) -> dict[str, Any]:
    return {
        "layers": list(stage.layers),
        "embedding": stage.has_embedding,
        "output": stage.has_output,
    }
