"""The tables of docs/models.md of number formats: in which each family trains, and in FP8 over
which ranks.

    python -m tests.trainyard.training.layouts.formats --write

Cells are what was recorded of the cases of `test_formats`, which compares gradients with those in
fp32 (tests/records.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from tests.records import Case, Records, cell, recorded, summary
from tests.trainyard.training.layouts.cases import RECOMPUTE, Cut
from tests.trainyard.training.layouts.kinds import KINDS, MODELS, SMALL
from tests.trainyard.training.layouts.matrix import PAGE, replaced
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.latent_config import LatentConfig
from trainyard.models.mtp_config import MTPConfig
from trainyard.optim.precision import PrecisionConfig

BEGIN = "<!-- generated: python -m tests.trainyard.training.layouts.formats --write -->"

FP16 = PrecisionConfig(fp16=True, initial_loss_scale=1024.0)
FORMATS: dict[str, PrecisionConfig] = {
    "bf16": PrecisionConfig(bf16=True),
    "fp16": FP16,
    **{
        f"FP8 {recipe}": PrecisionConfig(
            bf16=True,
            fp8_format="e4m3" if recipe == "blockwise" else "hybrid",
            fp8_recipe=recipe,  # type: ignore[arg-type]
        )
        for recipe in ("tensorwise", "delayed", "rowwise", "blockwise")
    },
}

WIDTH, HALF_OF_IT_FITS = 128, 256
"""Hidden sizes: blocks of FP8 need multiples of 128, also on each of two tensor-parallel ranks."""
SEQ_LENGTH = 128


def wide_options(kind: str, width: int) -> dict[str, Any]:
    """What a kind of model needs at a hidden size for all its products to be multiples of 128."""
    of_kind: dict[str, dict[str, Any]] = {
        "latent": {
            "mla": LatentConfig(
                multi_latent_attention=True,
                q_lora_rank=128,
                kv_lora_rank=128,
                qk_head_dim=width // 8,
                qk_pos_emb_head_dim=width // 8,
                v_head_dim=width // 8,
            )
        },
        "mixtral": {"moe": replace(KINDS["mixtral"]["moe"], moe_ffn_hidden_size=width)},
        "t5": {"decoder_seq_length": 64},
        "hybrid": {**{"mamba_num_groups": 2, "mamba_state_dim": width // 8, "mamba_head_dim": 4}},
        "retro": {"retro_cross_attention_layers": (2,)},
        "predicting": {"prediction": MTPConfig(mtp_num_layers=1)},
    }
    sizes = {"hidden_size": width, "ffn_hidden_size": width, "seq_length": SEQ_LENGTH}
    return {**sizes, **of_kind.get(kind, {})}


LAYERS = {"hybrid": 4, "retro": 2}
KIND_OF = {
    "GPT": "llama",
    "GPT, experts": "mixtral",
    "GPT, latent attention": "latent",
    "GPT, multi-token prediction": "predicting",
    "BERT": "bert",
    "T5": "t5",
    "Retro": "retro",
    "Mamba-2, hybrids": "hybrid",
}
"""The kind of model that is trained, by rows of the table."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor, sequence": {"tensor": "tp2 sp"},
    "pipeline": {"pp": 2},
    "data, optimizer sharded": {"dp": 2, "reduction": "zero"},
    "data, weights sharded": {"dp": 2, "reduction": "optim_grads_params"},
}
"""How FP8 is combined with ranks."""


@dataclass(frozen=True, slots=True)
class InFormat(Cut):
    """A run in a number format, at sizes that all formats take."""

    number_format: str | None = None
    """None: fp32."""
    width: int = WIDTH
    depth: int = 1
    """Layers, unless the kind has more."""

    @property
    def model(self) -> TransformerConfig:
        options = SMALL | KINDS[self.kind] | RECOMPUTE[self.recompute]
        options |= wide_options(self.kind, self.width)
        return MODELS.get(self.kind, GPTConfig)(
            **options,
            num_layers=max(LAYERS.get(self.kind, 1), self.depth),
            hidden_dropout=self.hidden_dropout,
        )

    @property
    def precision(self) -> PrecisionConfig:
        return PrecisionConfig() if self.number_format is None else FORMATS[self.number_format]


def in_layout(family: str, name: str, layout: str) -> InFormat:
    """The run of a family in FP8 over ranks."""
    of_layout = LAYOUTS[layout]
    is_cut = "tensor" in of_layout and FORMATS[name].fp8_recipe == "blockwise"
    return InFormat(
        kind=KIND_OF[family],
        hidden_dropout=0.0,
        number_format=name,
        width=HALF_OF_IT_FITS if is_cut else WIDTH,
        depth=of_layout.get("pp", 1),
        **of_layout,
    )


IN_8_BITS = tuple(name for name in FORMATS if name.startswith("FP8"))
TEST = "tests/trainyard/training/layouts/test_formats.py::"
ALONE = f"{TEST}test_a_family_trains_in_a_format_as_in_fp32"
OVER_RANKS = f"{TEST}test_a_family_trains_in_8_bits_over_ranks"


def case_alone(family: str, name: str) -> Case:
    """As pytest calls it."""
    return ALONE, f"{family}-{name}"


def cases_over_ranks(family: str, layout: str) -> list[tuple[str, Case]]:
    """Recipes, each with its case as pytest calls it."""
    return [
        (name.removeprefix("FP8 "), (OVER_RANKS, f"{family}-{name}-{layout}")) for name in IN_8_BITS
    ]


def alone_table(records: Records) -> str:
    """Formats on one process, in Markdown."""
    lines = [f"| | fp32 | {' | '.join(FORMATS)} |", f"|{' --- |' * (2 + len(FORMATS))}"]
    cases: list[Case] = []
    for family in KIND_OF:
        row = [case_alone(family, name) for name in FORMATS]
        cases += row
        # Each is compared with the same model in fp32.
        cells = [cell(row, records), *(cell([case], records) for case in row)]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(cases, records)])


def ranks_table(records: Records) -> str:
    """The recipes of FP8 that passed over ranks, in Markdown."""
    lines = [f"| FP8 | {' | '.join(LAYOUTS)} |", f"|{' --- |' * (1 + len(LAYOUTS))}"]
    cases: list[Case] = []
    for family in KIND_OF:
        cells = []
        for layout in LAYOUTS:
            row = cases_over_ranks(family, layout)
            cases += [case for _, case in row]
            said = [(name, cell([case], records)) for name, case in row]
            is_whole = len({outcome for _, outcome in said}) == 1
            apart = ", ".join(f"{name}: {outcome}" for name, outcome in said)
            cells.append(said[0][1] if is_whole else apart)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(cases, records)])


def written(page: str, records: Records) -> str:
    """The page with the tables as they are now."""
    made = f"{alone_table(records)}\n\n{ranks_table(records)}"
    return replaced(page, BEGIN, made)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("give --write")
    PAGE.write_text(written(PAGE.read_text(), recorded()))
