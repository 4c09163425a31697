"""Options of data parallelism, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_at_least, execution
from trainyard.errors import ConfigError

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

FULLY_SHARDED = ("optim_grads", "optim_grads_params")
"""Strategies that torch's `fully_shard` carries out."""

STRATEGY = "--data-parallel-sharding-strategy"
INSTANCES = "--num-distributed-optimizer-instances"

DEFAULT_BUCKET_SIZE = 40_000_000
"""Numbers in a bucket that overlaps: enough to fill the network, few enough to start early."""
PER_RANK_BUCKET_SIZE = 1_000_000
"""Minimum for each rank of a large group, whose ring splits a bucket by its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelConfig:
    """What data-parallel ranks shard, buckets of gradients, and their overlap with backward.

    None of it changes what a step is: sums are over the same ranks, in an order that may differ
    between three ranks and more."""

    use_distributed_optimizer: bool = execution(False)
    """Keep each number of the optimizer's state on one data-parallel rank only (ZeRO-1)."""
    data_parallel_sharding_strategy: (
        Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None
    ) = execution(None)
    """What the data-parallel ranks shard: nothing (no_shard), the optimizer's state (optim, the
    same as --use-distributed-optimizer), gradients too (optim_grads, ZeRO-2), or weights too
    (optim_grads_params, ZeRO-3); unset: as the other flags say."""
    use_torch_fsdp2: bool = execution(False)
    """Shard weights, gradients and state (--data-parallel-sharding-strategy optim_grads_params)."""
    torch_fsdp2_reshard_after_forward: bool = execution(True)
    """With --use-torch-fsdp2: free gathered weights after the forward pass of a layer; without,
    they stay for the step (optim_grads)."""
    use_megatron_fsdp: bool = execution(False)
    """The same as --use-torch-fsdp2, and --data-parallel-sharding-strategy may ask for less."""
    num_distributed_optimizer_instances: int = execution(1)
    """Divide the ranks into this many groups, each of which shards everything on its own, so that
    gathering stays within a group."""
    overlap_grad_reduce: bool = execution(False)
    """Sum gradients over ranks while the backward pass still works on earlier layers."""
    overlap_param_gather: bool = execution(False)
    """Gather updated parameters while the forward pass already runs; with
    --use-distributed-optimizer."""
    fp8_param_gather: bool = execution(False)
    """With --fp8-format and --use-distributed-optimizer, gather updated weights as the 8-bit
    numbers that products cast them to: half the bytes, and the same results."""
    ddp_bucket_size: int | None = execution(None)
    """Parameters in a bucket; unset: with --overlap-grad-reduce the larger of 40 million and a
    million per rank, otherwise all."""
    ddp_num_buckets: int | None = execution(None)
    """Approximate number of buckets, in place of --ddp-bucket-size."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = execution(False)
    """Pad the shards of the distributed optimizer to sizes that NCCL transfers fastest."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        sizes = ("ddp_bucket_size", "ddp_num_buckets")
        check_at_least(self, 1, *sizes, "num_distributed_optimizer_instances")
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            raise ConfigError("give --ddp-bucket-size or --ddp-num-buckets, not both")
        self._check_strategy()
        if self.overlap_param_gather and self.sharding == "no_shard":
            raise ConfigError(
                "--overlap-param-gather needs --use-distributed-optimizer; add it, or leave this "
                "out"
            )
        if self.fp8_param_gather and self.sharding == "no_shard":
            raise ConfigError(
                "--fp8-param-gather needs --use-distributed-optimizer; add it, or leave this out"
            )
        if self.ddp_pad_buckets_for_high_nccl_busbw and self.sharding != "optim":
            raise ConfigError(
                "--ddp-pad-buckets-for-high-nccl-busbw needs --use-distributed-optimizer; add it, "
                "or leave this out"
            )
        if self.num_distributed_optimizer_instances > 1 and self.sharding == "no_shard":
            raise ConfigError(
                f"{INSTANCES} {self.num_distributed_optimizer_instances} needs "
                f"--use-distributed-optimizer or a {STRATEGY} that shards something; add one, or "
                "leave this out"
            )

    def _check_strategy(self) -> None:
        strategy, given = self.data_parallel_sharding_strategy, self.use_torch_fsdp2
        if given and self.use_megatron_fsdp:
            raise ConfigError("give --use-torch-fsdp2 or --use-megatron-fsdp, not both")
        if given and self.use_distributed_optimizer:
            raise ConfigError(
                "--use-torch-fsdp2 shards the optimizer's state itself, so "
                "--use-distributed-optimizer has nothing to do; leave one of them out"
            )
        if given and strategy not in (None, *FULLY_SHARDED):
            raise ConfigError(
                f"--use-torch-fsdp2 shards gradients and weights, and {STRATEGY} {strategy} does "
                "not; leave one of them out"
            )
        if not self.torch_fsdp2_reshard_after_forward and not given:
            raise ConfigError(
                "--no-torch-fsdp2-reshard-after-forward needs --use-torch-fsdp2; add it, or leave "
                "this out"
            )

    @property
    def sharding(self) -> ShardingStrategy:
        """What the data-parallel ranks shard, by all flags together."""
        strategy = self.data_parallel_sharding_strategy
        if strategy is None and (self.use_torch_fsdp2 or self.use_megatron_fsdp):
            return "optim_grads_params" if self.torch_fsdp2_reshard_after_forward else "optim_grads"
        if strategy in (None, "no_shard"):  # in Megatron-LM no_shard is of FSDP alone, too
            return "optim" if self.use_distributed_optimizer else "no_shard"
        return strategy

    @property
    def fully_shards(self) -> bool:
        """Whether gradients are sharded, perhaps weights too (ZeRO-2 and 3)."""
        return self.sharding in FULLY_SHARDED

    @property
    def asked_by(self) -> str:
        """The flag that asks for `sharding`, for messages."""
        if self.data_parallel_sharding_strategy is not None:
            return f"{STRATEGY} {self.data_parallel_sharding_strategy}"
        return "--use-torch-fsdp2" if self.use_torch_fsdp2 else "--use-megatron-fsdp"

    def bucket_size(self, num_parameters: int, num_ranks: int) -> int | None:
        """Numbers in a bucket of a model of this many parameters; None for one bucket."""
        if self.ddp_num_buckets is not None:
            return -(-num_parameters // self.ddp_num_buckets)
        if self.ddp_bucket_size is not None or not self.overlap_grad_reduce:
            return self.ddp_bucket_size
        return max(DEFAULT_BUCKET_SIZE, PER_RANK_BUCKET_SIZE * num_ranks)
