"""Refuses optimizers and formats that do not go together, before any work."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.data_config import FULLY_SHARDED, ShardingStrategy


def check_optimizer(
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    sharding: ShardingStrategy = "no_shard",
) -> None:
    """Raise ConfigError for formats, and for shards of replicas, that the optimizer does not
    have."""
    if sharding in FULLY_SHARDED and (optimizer.optimizer == "muon" or optimizer.offloaded):
        name = "--optimizer muon" if optimizer.optimizer == "muon" else "--optimizer-cpu-offload"
        raise ConfigError(
            f"{name} and --data-parallel-sharding-strategy {sharding} exclude each other; give "
            "--use-distributed-optimizer, which shards the optimizer's state alone"
        )
    if optimizer.optimizer == "muon" and precision.fp16:
        raise ConfigError(
            "--optimizer muon and --fp16 exclude each other, as in Megatron-LM: momenta without "
            "the scale of the loss are too small for float16; give --bf16"
        )
    if precision.moment_formats and optimizer.optimizer != "adam":
        raise ConfigError(
            "--exp-avg-dtype and --exp-avg-sq-dtype apply to the moments of --optimizer adam, not "
            "to "
            f"{optimizer.optimizer}, which keeps its state in fp32; leave them out"
        )
