"""Memory of generation by the planned model: a table of the JSON document, and its lines."""

from __future__ import annotations

from typing import Any

from stages.plan.config import PlanConfig
from stages.plan.fit import GIBIBYTE
from trainyard.config import flag
from trainyard.errors import ConfigError
from trainyard.models.costs.inference_memory import InferenceMemory, inference_memory
from trainyard.models.families import family_of

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a weight in generation."""


def memory_of(config: PlanConfig) -> InferenceMemory | None:
    """Of the most loaded device; None for a family that does not generate. Raises ConfigError where
    it was asked for all the same."""
    model = config.model
    if not family_of(model).generates:
        options = ("inference_max_seq_length", "inference_memory_gib")
        if given := [flag(name) for name in options if getattr(config, name) is not None]:
            raise ConfigError(
                f"{' and '.join(given)}: a --model-type {model.model_type} generates no text here; "
                "leave it out"
            )
        return None
    longest = model.output_length if model.model_type == "t5" else model.positions
    return inference_memory(
        model,
        config.rows,
        config.layout(),
        bytes_each=BYTES[config.number_format],
        tokens=config.inference_max_seq_length or longest,
    )


def inference_document(config: PlanConfig) -> dict[str, Any] | None:
    """Bytes, and with --inference-memory-gib the requests that fit."""
    memory = memory_of(config)
    if memory is None:
        return None
    limit = config.inference_memory_gib
    return {
        "weight_bytes": memory.weights,
        "kv_bytes_per_token": memory.kv_per_token,
        "kv_bytes_per_source_token": memory.kv_per_source_token,
        "tokens_per_request": memory.tokens,
        "source_tokens_per_request": memory.source_tokens,
        "kv_bytes_per_request": memory.kv_per_request,
        "state_bytes_per_request": memory.state,
        "requests_that_fit": None if limit is None else memory.requests_in(limit * GIBIBYTE),
    }


def inference_lines(config: PlanConfig) -> list[str]:
    """The same for a person."""
    memory = memory_of(config)
    if memory is None:
        return []
    length = f"{memory.tokens:,} tokens"
    if memory.source_tokens:
        length += f" after a text of {memory.source_tokens:,}"
    kib, mib = memory.kv_per_token / 2**10, memory.kv_per_request / 2**20
    lines = [
        f"Generation, a device without workspaces: weights {memory.weights / GIBIBYTE:,.2f} GiB",
        f"  keys and values: {kib:,.1f} KiB per token, {mib:,.1f} MiB per request of {length}",
    ]
    if memory.state:
        lines.append(f"  states: {memory.state / 2**20:,.1f} MiB per request of any length")
    if config.inference_memory_gib is not None:
        fit = memory.requests_in(config.inference_memory_gib * GIBIBYTE)
        lines.append(f"  requests that fit in {config.inference_memory_gib:g} GiB: {fit:,}")
    return lines
