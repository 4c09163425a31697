"""How gradients are gathered over data-parallel ranks, under Megatron-LM's names. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import execution
from trainyard.errors import ConfigError

DEFAULT_BUCKET_SIZE = 40_000_000
"""Numbers in a bucket that is to be overlapped: enough to fill the network, few enough to begin
early."""

PER_RANK_BUCKET_SIZE = 1_000_000
"""... and at least so many for each rank of a large group: a ring's messages are cut by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelConfig:
    """Buckets of gradients, their overlap with backward, and the distributed optimizer.

    None of it changes what a step is: sums are over the same ranks, in an order that may differ
    between three ranks and more."""

    use_distributed_optimizer: bool = execution(False)
    """Keep each number of the optimizer's state on one data-parallel rank only (ZeRO-1)."""
    overlap_grad_reduce: bool = execution(False)
    """Add gradients up over ranks while backward still works on earlier layers."""
    overlap_param_gather: bool = execution(False)
    """Fetch updated parameters while forward already works; with --use-distributed-optimizer."""
    ddp_bucket_size: int | None = execution(None)
    """Numbers in a bucket; unset: 40 million or a million for each rank with
    --overlap-grad-reduce, else all of them."""
    ddp_num_buckets: int | None = execution(None)
    """How many buckets to aim at, in place of --ddp-bucket-size."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = execution(False)
    """Pad the pieces of the distributed optimizer to sizes that NCCL moves fastest."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, in words."""
        for name in ("ddp_bucket_size", "ddp_num_buckets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            raise ConfigError("give --ddp-bucket-size or --ddp-num-buckets, not both")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ConfigError(
                "--overlap-param-gather fetches what --use-distributed-optimizer spreads over the "
                "ranks; add that, or leave it out"
            )
        if self.ddp_pad_buckets_for_high_nccl_busbw and not self.use_distributed_optimizer:
            raise ConfigError(
                "--ddp-pad-buckets-for-high-nccl-busbw pads the pieces of "
                "--use-distributed-optimizer; add that, or leave it out"
            )

    def bucket_size(self, num_parameters: int, num_ranks: int) -> int | None:
        """Numbers in a bucket of a model of so many parameters; None for one bucket."""
        if self.ddp_num_buckets is not None:
            return -(-num_parameters // self.ddp_num_buckets)
        if self.ddp_bucket_size is not None or not self.overlap_grad_reduce:
            return self.ddp_bucket_size
        return max(DEFAULT_BUCKET_SIZE, PER_RANK_BUCKET_SIZE * num_ranks)
