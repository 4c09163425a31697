"""The table of docs/models.md of number formats: in which each family trains.

    python -m tests.trainyard.training.layouts.formats --write

Cells are the cases of `test_formats`, which compares gradients with those in fp32."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from tests.trainyard.training.layouts.cases import Cut
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

WIDE: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 128, "seq_length": 128}
"""Sizes that are multiples of 128, which blocks of FP8 need."""
LATENT = LatentConfig(
    multi_latent_attention=True,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_head_dim=16,
    qk_pos_emb_head_dim=16,
    v_head_dim=16,
)
WIDE_OF: dict[str, dict[str, Any]] = {
    "latent": {"mla": LATENT},
    "mixtral": {"moe": replace(KINDS["mixtral"]["moe"], moe_ffn_hidden_size=128)},
    "t5": {"decoder_seq_length": 64},
    "hybrid": {"mamba_num_groups": 1, "mamba_state_dim": 32, "mamba_head_dim": 4},
    "retro": {"retro_cross_attention_layers": (2,)},
    "predicting": {"prediction": MTPConfig(mtp_num_layers=1)},
}
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


@dataclass(frozen=True, slots=True)
class InFormat(Cut):
    """A run of one process in a number format, at sizes that all formats take."""

    number_format: str | None = None
    """None: fp32."""

    @property
    def model(self) -> TransformerConfig:
        options = SMALL | KINDS[self.kind] | WIDE | WIDE_OF.get(self.kind, {})
        build = MODELS.get(self.kind, GPTConfig)
        return build(
            **options, num_layers=LAYERS.get(self.kind, 1), hidden_dropout=self.hidden_dropout
        )

    @property
    def precision(self) -> PrecisionConfig:
        return PrecisionConfig() if self.number_format is None else FORMATS[self.number_format]


def table() -> str:
    """The table, in Markdown."""
    lines = [f"| | fp32 | {' | '.join(FORMATS)} |", f"|{' --- |' * (2 + len(FORMATS))}"]
    for family in KIND_OF:
        lines.append(f"| {family} | yes |{' yes |' * len(FORMATS)}")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table as it is now."""
    return replaced(page, BEGIN, table())


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("give --write")
    PAGE.write_text(written(PAGE.read_text()))
