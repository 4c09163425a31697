"""Refuses trainings that cannot be fully sharded, before any work."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.training.options.watch import WatchConfig


def check_sharding(model: TransformerConfig, parallel: ParallelConfig, watch: WatchConfig) -> None:
    """Raise ConfigError for what sharded gradients and weights exclude."""
    data = parallel.data_parallel
    if not data.fully_shards:
        return
    if model.cpu_offloading_num_layers:
        raise ConfigError(
            f"--cpu-offloading-num-layers ({model.cpu_offloading_num_layers}) and {data.asked_by}: "
            "gathered weights would go to the host with the activations; use "
            "--recompute-granularity full, or --use-distributed-optimizer"
        )
    interval = watch.check_weight_hash_across_dp_replicas_interval
    if interval is not None:
        raise ConfigError(
            f"--check-weight-hash-across-dp-replicas-interval {interval} and {data.asked_by}: each "
            "rank keeps other rows of a weight, so there is nothing to compare; leave one of them "
            "out"
        )
