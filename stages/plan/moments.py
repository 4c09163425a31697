"""Bytes of a parameter's moments, by the optimizer."""

from __future__ import annotations

import dataclasses

from trainyard.models.config import TransformerConfig
from trainyard.models.costs.memory import count_parameters
from trainyard.models.parallel_layout import ONE_MOMENT_BYTES, ParallelLayout
from trainyard.optim.config import OptimizerKind


def with_moments(
    layout: ParallelLayout,
    kinds: tuple[OptimizerKind, OptimizerKind],
    adam_bytes: int,
    config: TransformerConfig,
    padded_vocab_size: int,
) -> ParallelLayout:
    """The layout with the mean bytes of a parameter's moments on the most loaded device.

    kinds: --optimizer, and the rule of the parameters that Muon leaves to another one: embedding
    and output layer, beside which norms and biases are nothing. adam_bytes: of Adam's moments."""
    first, rest = (adam_bytes if kind == "adam" else ONE_MOMENT_BYTES for kind in kinds)
    found: float = first
    if kinds[0] == "muon":
        count = count_parameters(config, padded_vocab_size, layout)
        one_table = padded_vocab_size * config.hidden_size
        tables = count.embedding if layout.pp == 1 else one_table
        share = tables / layout.tp / count.most_loaded_shard
        found = share * rest + (1 - share) * ONE_MOMENT_BYTES
    return dataclasses.replace(layout, moment_bytes=found)
