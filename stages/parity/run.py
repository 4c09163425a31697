"""Lets every engine continue some prompts, and compares it with the training's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stages.parity.config import MAX_NEW, MAX_PROMPT, ParityConfig
from stages.runtime.context import StageRun
from trainyard.charts.text_table import text_table
from trainyard.errors import DataError
from trainyard.evaluation.parity import ParityRow, measure_parity
from trainyard.inference.config import check_length
from trainyard.inference.dynamic.build import check_family
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.on_ranks import model_on_ranks
from trainyard.inference.prompts import prompt_tokens
from trainyard.models.init import named_generator
from trainyard.parallel.device import device_name

FORMAT_VERSION = 1


def run(config: ParityConfig, stage: StageRun) -> dict[str, Any]:
    """Print the table, and write it with --output-dir. DataError for an engine that differs by more
    than the tolerance; nothing is published then."""
    with model_on_ranks(config) as loaded:
        check_family(loaded.config)
        half = max(loaded.config.positions // 2, 1)
        count = config.num_tokens_to_generate or min(MAX_NEW, half)
        longest = config.num_input_tokens or min(MAX_PROMPT, half)
        if not config.prompts:  # before they are made
            what = f"--num-input-tokens {longest}"
            check_length(what, longest, count, loaded.config.positions)
        prompts = prompts_of(config, loaded, longest)
        for prompt in prompts:
            check_length(
                f"a prompt of {len(prompt)} tokens", len(prompt), count, loaded.config.positions
            )
        rows = measure_parity(loaded, prompts, count)
        is_first, step, device = loaded.groups.rank == 0, loaded.step, loaded.model.device
    if not is_first:
        return {}
    print("\n".join(table(rows)))
    check(rows, config.allowed, config.load)
    worst = max(row.max_difference for row in rows)
    if stage.output is not None:
        document = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "precision": config.precision,
            "tolerance": config.allowed,
            "num_prompts": len(prompts),
            "tensor_model_parallel_size": config.layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": config.layout.pipeline_model_parallel_size,
            "device": device_name(device),
            "rows": [row.document() for row in rows],
        }
        # Differences of rounding are another machine's business than the table of the last one.
        stage.write_json("parity.json", document, volatile=True)
    return {"max_difference": worst, "tolerance": config.allowed}


def prompts_of(config: ParityConfig, loaded: ModelOnRanks, longest: int) -> list[list[int]]:
    """The prompts as tokens. longest: tokens of the longest random one."""
    tokenizer = loaded.tokenizer
    if config.prompts:
        return [prompt_tokens(tokenizer, text) for text in config.prompts]
    number = config.num_prompts
    generator = named_generator("parity", config.seed)
    lengths = [-(-longest * (index + 1) // number) for index in range(number)]
    return [
        torch.randint(tokenizer.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]


def table(rows: Sequence[ParityRow]) -> list[str]:
    """Lines for a terminal."""
    heads = ("engine", "prompt tokens", "new tokens", "likeliest", "max", "mean difference")
    cells = [
        (
            row.engine,
            f"{row.num_prompt_tokens}",
            f"{row.num_new_tokens}",
            f"{row.num_likeliest}",
            f"{row.max_difference:.2e}",
            f"{row.mean_difference:.2e}",
        )
        for row in rows
    ]
    return text_table([heads, *cells])


def check(rows: Sequence[ParityRow], tolerance: float, load: str) -> None:
    """DataError with the engines that differ by more than the tolerance, or by no number."""
    wrong = [row for row in rows if not row.max_difference <= tolerance]
    if wrong:
        found = "; ".join(f"{row.engine}: {row.max_difference:.3g}" for row in wrong)
        raise DataError(
            f"{load}: log-probabilities of the training's forward and of an engine differ by more "
            f"than --tolerance {tolerance:g} nats ({found}); the model would not be served as it "
            "was trained, so do not release it"
        )
