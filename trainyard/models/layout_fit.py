"""Whether a model can be spread over ranks that only read it. No torch."""

from __future__ import annotations

from dataclasses import replace

from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.layout_checks import check_model


def check_layout_fits(
    parallel: ParallelConfig, config: TransformerConfig, padded_vocab_size: int | None = None
) -> None:
    """Raise ConfigError for a layout that does not divide the model. Any number of layers may be on
    a stage, but each has one."""
    stages = parallel.pipeline_model_parallel_size
    config.check_parallel(parallel)
    if stages > config.all_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} is more than the {config.all_layers} layers "
            "of the model; give at most that"
        )
    check_model(
        replace(parallel, pipeline_model_parallel_size=1),
        num_layers=config.all_layers,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        ffn_hidden_size=config.ffn_size,
        seq_length=config.seq_length,
        padded_vocab_size=padded_vocab_size,
    )
