"""Options of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), under
Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.config import check_above_zero, check_at_least, check_at_most
from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.pipeline.layout import count_predicting

MAX_DEPTHS = 64
"""Each has a layer, logits of its own and a loss in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Layers that predict further tokens in training."""

    mtp_num_layers: int | None = None
    """Number of tokens after the next one to predict in training, each by an additional layer;
    unset: none."""
    mtp_loss_scaling_factor: float = 0.1
    """Factor of the mean loss of these additional layers."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible numbers."""
        check_above_zero(self, "mtp_num_layers")
        check_at_most(self, MAX_DEPTHS, "mtp_num_layers")
        check_at_least(self, 0, "mtp_loss_scaling_factor")

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Of the losses in the log, as in Megatron-LM, by depth."""
        return tuple(f"mtp_{depth} loss" for depth in range(1, (self.mtp_num_layers or 0) + 1))


NO_MTP = MTPConfig()


def check_mtp(config: Any) -> None:
    """Raise ConfigError for options that multi-token prediction does not go with."""
    depths = config.mtp.mtp_num_layers
    if depths is None:
        return
    if config.position_embedding_type == "learned_absolute":
        raise ConfigError(
            "--mtp-num-layers embeds tokens again at later places, which --position-embedding-type "
            "learned_absolute has no rows for; give rope, yarn or none"
        )
    if depths >= config.seq_length:
        raise ConfigError(
            f"--mtp-num-layers ({depths}) must be below --seq-length ({config.seq_length}), in "
            "which the tokens that it predicts are"
        )


def check_mtp_layout(config: Any, parallel: ParallelConfig) -> None:
    """Raise ConfigError if a layout of the pipeline has another number of these layers."""
    layout, depths = parallel.pipeline_model_parallel_layout, config.mtp.mtp_num_layers
    if layout is None or count_predicting(layout) in (0, depths):
        return
    raise ConfigError(
        f"--pipeline-model-parallel-layout {layout!r} has {count_predicting(layout)} layers of "
        f"multi-token prediction (m), --mtp-num-layers is {depths or 'not set'}"
    )
