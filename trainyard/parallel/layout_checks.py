"""Whether a model can be cut as asked: every refusal names both numbers and what would work.
Standard library only, so that it is told before torch is loaded."""

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
    """Refuse a model that these degrees cannot share, in words.

    num_query_groups: heads of keys and values, as many as query heads unless grouped.
    padded_vocab_size: where it is known. rule: the flag that keeps attention from keys that are
    before it, if one does."""
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
    """Context parallelism cuts in 2 cp pieces, sequence parallelism each rank's two in tp."""
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
    """Heads of a tensor-parallel rank are exchanged for sequence, so they must be enough."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    for flag, count in {"--num-attention-heads": heads, "--num-query-groups": groups}.items():
        if (count // tp) % cp:
            shared = f" / {TP} ({tp})" if tp > 1 else ""
            raise ConfigError(
                f"--cp-comm-type a2a: {flag} ({count}){shared} must be divisible by {CP} ({cp}); "
                f"{nearest(CP, divisors(count // tp, cp))}, or use --cp-comm-type p2p"
            )


def _check_ring(config: ParallelConfig, rule: str, heads: int, groups: int) -> None:
    """Keys that travel a ring meet no rule but causality."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    if cp == 1 or config.cp_comm_type != "p2p":
        return
    fits = (heads // tp) % cp == 0 and (groups // tp) % cp == 0
    raise ConfigError(
        "--cp-comm-type p2p, the default, passes keys round with no rule but causality, and "
        f"{rule} asks for another one; with {CP} ({cp}) it works with --cp-comm-type allgather"
        + (" or a2a" if fits else "")
    )


def check_group_size(config: ParallelConfig, num_microbatches: int) -> None:
    """Refuse --microbatch-group-size-per-virtual-pipeline-stage that does not fit the micro-batches
    of a step; smaller steps of a growing batch choose their own."""
    wanted = config.microbatch_group_size_per_virtual_pipeline_stage
    if wanted is not None and config.pipeline_model_parallel_size > 1:
        choose_group_size(config.pipeline_model_parallel_size, num_microbatches, wanted)
