"""Checks that a model fits its parallel layout; errors name both numbers and what would work.
Standard library only, so that they run before torch is loaded."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.parallel.config import CP, TP, ParallelConfig
from trainyard.parallel.divisible import divides, divisors, multiples, nearest
from trainyard.parallel.pipeline.partition import partition
from trainyard.parallel.pipeline.schedule import choose_group_size


def check_model(
    config: ParallelConfig,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    seq_length: int,
    padded_vocab_size: int | None = None,
    rule: str | None = None,
) -> None:
    """Raise ConfigError for a model that these degrees do not divide.

    num_query_groups: heads of keys and values, as many as query heads unless grouped.
    padded_vocab_size: if known. rule: the flag that hides earlier keys from attention, if any."""
    tp = config.tensor_model_parallel_size
    grouped = num_query_groups != num_attention_heads
    divides("--num-attention-heads", num_attention_heads, TP, tp)
    if grouped:
        divides("--num-query-groups", num_query_groups, TP, tp)
    divides("--ffn-hidden-size", ffn_hidden_size, TP, tp)
    if padded_vocab_size is not None:
        divides("the padded vocabulary", padded_vocab_size, TP, tp)
    _check_sequence(config, seq_length)
    if config.cp_comm_type == "a2a" and config.context_parallel_size > 1:
        _check_exchange(config, num_attention_heads, num_query_groups)
    if rule is not None:
        _check_ring(config, rule, num_attention_heads, num_query_groups)
    partition(config, num_layers)


def _check_sequence(config: ParallelConfig, seq_length: int) -> None:
    """Context parallelism makes 2 cp pieces, sequence parallelism splits each rank's two in tp."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    if cp > 1 and seq_length % (2 * cp):
        raise ConfigError(
            f"--seq-length ({seq_length}) must be divisible by 2 x {CP} ({2 * cp}), as each rank "
            f"takes two pieces; {nearest('--seq-length', multiples(seq_length, 2 * cp))}, or "
            f"{nearest(CP, divisors(seq_length // 2, cp) if seq_length % 2 == 0 else [1])}"
        )
    if config.sequence_parallel and (seq_length // cp) % tp:
        unit = 2 * cp * tp if cp > 1 else tp
        raise ConfigError(
            f"--seq-length ({seq_length}){f' / {CP} ({cp})' if cp > 1 else ''} must be divisible "
            f"by {TP} ({tp}) under --sequence-parallel; "
            f"{nearest('--seq-length', multiples(seq_length, unit))}"
        )


def _check_exchange(config: ParallelConfig, heads: int, groups: int) -> None:
    """a2a exchanges heads of a tensor-parallel rank for sequence, so cp must divide them."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    for flag, count in {"--num-attention-heads": heads, "--num-query-groups": groups}.items():
        if (count // tp) % cp:
            shared = f" / {TP} ({tp})" if tp > 1 else ""
            raise ConfigError(
                f"--cp-comm-type a2a: {flag} ({count}){shared} must be divisible by {CP} ({cp}); "
                f"{nearest(CP, divisors(count // tp, cp))}, or use --cp-comm-type p2p"
            )


def _check_ring(config: ParallelConfig, rule: str, heads: int, groups: int) -> None:
    """A ring supports no mask but causality."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    if cp == 1 or config.cp_comm_type != "p2p":
        return
    fits = (heads // tp) % cp == 0 and (groups // tp) % cp == 0
    raise ConfigError(
        "--cp-comm-type p2p, the default, sends keys around a ring and supports only causal "
        "attention, and "
        f"{rule} asks for another one; with {CP} ({cp}) it works with --cp-comm-type allgather"
        + (" or a2a" if fits else "")
    )


def check_group_size(config: ParallelConfig, num_microbatches: int) -> None:
    """Raise ConfigError if --microbatch-group-size-per-virtual-pipeline-stage does not fit the
    micro-batches of a step; smaller steps of a growing batch choose their own."""
    wanted = config.microbatch_group_size_per_virtual_pipeline_stage
    if wanted is not None and config.pipeline_model_parallel_size > 1:
        choose_group_size(config.pipeline_model_parallel_size, num_microbatches, wanted)
