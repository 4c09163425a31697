"""Options of the dynamic engine, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_above_zero, check_at_least, check_at_most, execution
from trainyard.errors import ConfigError

MAX_GUESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicConfig:
    """Memory of the model and its cache, and what a step computes. Except for
    --inference-weight-dtype and --kv-cache-dtype, texts do not depend on these options, up to
    rounding."""

    inference_dynamic_batching_buffer_size_gb: float | None = execution(None)
    """Memory of keys, values and states on each rank, in GiB; unset: what the requests need at
    their longest, within 9 tenths of a GPU's free memory, or half of the machine's."""
    inference_dynamic_batching_buffer_guaranteed_fraction: float = execution(0.01)
    """Share of the blocks that is reserved for the next tokens of running requests."""
    inference_dynamic_batching_block_size: int = execution(256)
    """Tokens of a block of keys and values."""
    inference_dynamic_batching_max_requests: int = execution(256)
    """Requests that run at once; further ones wait. If layers keep states and memory cannot hold
    those of this many requests, the number is lowered."""
    inference_dynamic_batching_max_tokens: int = execution(8192)
    """Tokens of a step over all requests: one of each text that is continued, the rest prompts."""
    disable_chunked_prefill: bool = execution(False)
    """Compute each prompt in one step, even if that step takes longer than others."""
    disable_prefix_caching: bool = execution(False)
    """Do not reuse blocks that already hold the beginning of a prompt. Models with Mamba-2 layers
    never reuse them, because their states are not kept."""
    inference_weight_dtype: Literal["int8", "fp8"] | None = None
    """Keep the matrices of the layers in 8 bits, with a scale for each output channel: half the
    memory of bf16, and with fp8 on a Hopper GPU faster products; unset: in the format of the
    computation."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Keep keys and values in E4M3 without a scale, half the memory of 16 bits; unset: in the type
    of the computation. Not for T5 and Retro in batches. The static engine does this too."""
    inference_attention_backend: Literal["flash"] | None = execution(None)
    """flash: the flash-attn package attends to keys and values in blocks; refused where none is
    installed that can. Unset: a kernel of this package on GPUs, else torch."""
    num_speculative_tokens: int = execution(0)
    """Guess this many tokens from what followed the last tokens earlier in the text, and keep those
    that the model would have chosen."""
    inference_dynamic_batching_num_cuda_graphs: int = execution(0)
    """Number of CUDA graphs to record for steps of one token per request, each for another number
    of requests; 0: none."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        prefix = "inference_dynamic_batching_"
        if self.inference_dynamic_batching_buffer_size_gb is not None:
            check_above_zero(self, f"{prefix}buffer_size_gb")
        names = ("block_size", "max_requests", "max_tokens")
        check_at_least(self, 1, *(prefix + name for name in names))
        check_at_least(self, 0, "num_speculative_tokens", f"{prefix}num_cuda_graphs")
        check_at_most(self, MAX_GUESSES, "num_speculative_tokens")
        fraction = self.inference_dynamic_batching_buffer_guaranteed_fraction
        if not 0.0 <= fraction < 1.0:
            raise ConfigError(
                "--inference-dynamic-batching-buffer-guaranteed-fraction must be in [0, 1), got "
                f"{fraction}"
            )
        requests = self.inference_dynamic_batching_max_requests
        tokens = self.inference_dynamic_batching_max_tokens
        if tokens < requests:
            raise ConfigError(
                f"--inference-dynamic-batching-max-tokens {tokens} is less than "
                f"--inference-dynamic-batching-max-requests {requests}, each of which has a token "
                "in every step; raise the one, or lower the other"
            )
