"""The table of docs/models.md of formats and precisions: what `reshard` writes of each family.

    python -m tests.stages.reshard_matrix --write

A cell is what was recorded of a case of `test_reshard_matrix` (tests/records.py): if it passed, the
precisions of the round trip, or a dash where the test has a refusal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.records import Case, Records, cell, recorded, summary
from tests.trainyard.conversion.megatron import (
    test_bert,
    test_latent,
    test_mamba,
    test_retro,
    test_t5,
)
from tests.trainyard.conversion.torch_dist.families import (
    EXPERTS,
    LATENT,
    MIXTRAL,
    Sample,
    gpt,
)
from tests.trainyard.training.layouts.matrix import PAGE, replaced
from trainyard.models.moe_config import MoEConfig

BEGIN = "<!-- generated: python -m tests.stages.reshard_matrix --write -->"

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


SHARED = replace(test_latent.EXPERTS, moe_shared_expert_intermediate_size=24)
FAMILIES: dict[str, Callable[[], Sample]] = {
    "GPT": partial(gpt, replace(MIXTRAL, moe=MoEConfig())),
    "GPT, experts": partial(gpt, MIXTRAL),
    "GPT, latent attention": partial(gpt, replace(LATENT, norm_epsilon=1e-6)),
    "GPT, multi-token prediction": partial(
        gpt, replace(test_latent.LATENT, norm_epsilon=1e-6, moe=SHARED)
    ),
    "BERT": partial(test_bert.weights, bias_gelu_fusion=False),
    "T5": test_t5.weights,
    "Retro": test_retro.weights,
    "Mamba-2, hybrids": partial(
        test_mamba.weights, **test_mamba.KINDS["hybrid"], squared_relu=True
    ),
}
GOOGLE_T5: dict[str, Any] = {
    **{"position_embedding_type": "relative", "normalization": "RMSNorm", "softmax_scale": 1.0},
    **{"disable_bias_linear": True, "relu": True, "lm_head_bias": False},
    "scale_lm_head_input": True,
}
OTHERS: dict[tuple[str, str], Callable[[], Sample]] = {
    ("T5", "Hugging Face"): partial(test_t5.weights, **GOOGLE_T5)
}
"""Where one model does not fit all formats of its family."""

FORMATS: dict[str, dict[str, Any]] = {
    "trainyard": {"num_shards": 2},
    "core, `torch`": {
        **{"saver": "core", "target_tensor_parallel_size": 2},
        "target_pipeline_parallel_size": 2,
    },
    "legacy, `torch`": {"saver": "legacy", "target_tensor_parallel_size": 2},
    "core, `torch_dist`": {"saver": "torch_dist", "num_shards": 2},
    "Hugging Face": {"saver": "hf"},
    "Meta": {
        **{"saver": "llama_mistral", "saver_checkpoint_type": "meta"},
        "target_tensor_parallel_size": 2,
    },
}
"""Options of `reshard`."""

CORE, LEGACY, META = "core, `torch`", "legacy, `torch`", "Meta"
REFUSED = {
    *(("Retro", name) for name in (LEGACY, META, "Hugging Face")),
    *((family, META) for family in FAMILIES if family != "GPT"),
    *((family, LEGACY) for family in FAMILIES if family.startswith(("GPT,", "Mamba"))),
}
"""Formats that have no such model."""


def sample_of(family: str, name: str) -> Sample:
    """The model of a case."""
    return OTHERS.get((family, name), FAMILIES[family])()


def options_of(family: str, name: str, config: Any) -> dict[str, Any]:
    """Options of `reshard` for a case: ranks of every kind that the format has for the family."""
    options = dict(FORMATS[name])
    if name == CORE and family in ("T5", "Retro"):
        del options["target_pipeline_parallel_size"]
    if name == CORE and config.experts.num_experts == EXPERTS.num_experts:
        options["target_expert_parallel_size"] = 2
    return options


TEST = "tests/stages/test_reshard_matrix.py::"
WRITES = f"{TEST}test_what_is_written_reads_back_bit_for_bit"
REFUSES = f"{TEST}test_what_a_format_does_not_have_is_refused"


def case_of(family: str, name: str) -> Case:
    """As pytest calls it."""
    return REFUSES if (family, name) in REFUSED else WRITES, f"{family}-{name}"


def table(records: Records) -> str:
    """The table, in Markdown."""
    lines = [f"| | {' | '.join(FORMATS)} |", f"|{' --- |' * (1 + len(FORMATS))}"]
    cases: list[Case] = []
    for family in FAMILIES:
        row = [case_of(family, name) for name in FORMATS]
        cases += row
        cells = []
        for case in row:
            found = cell([case], records)
            said = "-" if case[0] == REFUSES else ", ".join(PRECISIONS)
            cells.append(said if found == "yes" else found)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(cases, records)])


def written(page: str, records: Records) -> str:
    """The page with the table as it is now."""
    return replaced(page, BEGIN, table(records))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("give --write")
    PAGE.write_text(written(PAGE.read_text(), recorded()))
