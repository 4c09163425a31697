"""Memory of generation by the planned model: a table of the JSON document, and its lines."""

from __future__ import annotations

import math
from typing import Any

from stages.plan.config import PlanConfig
from stages.plan.fit import GIBIBYTE
from trainyard.config import flag
from trainyard.errors import ConfigError
from trainyard.models.costs.inference_memory import (
    PROMPT_TOKENS,
    InferenceMemory,
    inference_memory,
)
from trainyard.models.families import family_of

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a weight in generation."""


def memory_of(config: PlanConfig) -> list[InferenceMemory]:
    """Of a device of each pipeline stage; empty for a family that does not generate. Raises
    ConfigError where it was asked for all the same."""
    model = config.model
    if not family_of(model).generates:
        options = ("inference_max_seq_length", "inference_memory_gib")
        if given := [flag(name) for name in options if getattr(config, name) is not None]:
            raise ConfigError(
                f"{' and '.join(given)}: a --model-type {model.model_type} generates no text here; "
                "leave it out"
            )
        return []
    longest = model.output_length if model.model_type == "t5" else model.positions
    return inference_memory(
        model,
        config.rows,
        config.layout(),
        bytes_each=BYTES[config.number_format],
        tokens=config.inference_max_seq_length or longest,
    )


def inference_document(config: PlanConfig) -> dict[str, Any] | None:
    """Bytes, each of the stage with the most, and with --inference-memory-gib the requests that fit
    on every stage."""
    stages = memory_of(config)
    if not stages:
        return None
    limit = config.inference_memory_gib
    fit = math.inf if limit is None else min(one.requests_in(limit * GIBIBYTE) for one in stages)
    return {
        "weight_bytes": max(one.weights for one in stages),
        "kv_bytes_per_token": max(one.kv_per_token for one in stages),
        "kv_bytes_per_source_token": max(one.kv_per_source_token for one in stages),
        "tokens_per_request": stages[0].tokens,
        "source_tokens_per_request": stages[0].source_tokens,
        "kv_bytes_per_request": max(one.kv_per_request for one in stages),
        "bytes_per_prompt_token": max(one.per_prompt_token for one in stages),
        "state_bytes_per_request": max(one.state for one in stages),
        "requests_that_fit": int(fit) if math.isfinite(fit) else None,
    }


def inference_lines(config: PlanConfig) -> list[str]:
    """The same for a person."""
    found = inference_document(config)
    if found is None:
        return []
    length = f"{found['tokens_per_request']:,} tokens"
    if found["source_tokens_per_request"]:
        length += f" after a text of {found['source_tokens_per_request']:,}"
    kib, mib = found["kv_bytes_per_token"] / 2**10, found["kv_bytes_per_request"] / 2**20
    weights = found["weight_bytes"] / GIBIBYTE
    lines = [
        f"Generation, a device without workspaces: weights {weights:,.2f} GiB",
        f"  keys and values: {kib:,.1f} KiB per token, {mib:,.1f} MiB per request of {length}",
    ]
    at_once = found["bytes_per_prompt_token"] / 2**10
    lines.append(
        f"  prompts: {at_once:,.1f} KiB more per token of a dense model, for at most "
        f"{PROMPT_TOKENS:,} or one prompt at once"
    )
    if states := found["state_bytes_per_request"]:
        lines.append(f"  states: {states / 2**20:,.1f} MiB per request of any length")
    if (fit := found["requests_that_fit"]) is not None:
        lines.append(f"  requests that fit in {config.inference_memory_gib:g} GiB: {fit:,}")
    return lines
