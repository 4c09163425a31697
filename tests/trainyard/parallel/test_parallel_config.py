"""What the options of parallelism refuse, and what of them belongs to the identity of a run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from trainyard.config import digest_relevant
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.parallel.config import DEFAULT_ORDER, ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.layout_checks import check_model
from trainyard.training.options.sharding_checks import check_sharding
from trainyard.training.options.watch import WatchConfig

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size must be at least 1, got 0"),
    ({"sequence_parallel": True}, "--sequence-parallel .* give --tensor-model-parallel-size 2"),
    (
        {"tensor_model_parallel_size": 2, "tp_comm_overlap": True},
        "--tp-comm-overlap .* needs --sequence-parallel",
    ),
    ({"distribute_saved_activations": True}, "--distribute-saved-activations .* use that"),
    ({"rank_order": "tp-pp-dp"}, "--rank-order tp-pp-dp must name each of tp, cp, ep, dp, pp once"),
    (
        {"rank_order": "pp-tp-cp-ep-dp", "use_tp_pp_dp_mapping": True},
        "--use-tp-pp-dp-mapping means .* give one of them",
    ),
    (
        {"microbatch_group_size_per_virtual_pipeline_stage": 4},
        "-per-virtual-pipeline-stage 4 applies only to the interleaved schedule",
    ),
    (
        {
            "pipeline_model_parallel_size": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_virtual_pipeline_stage": 2,
        },
        r"per-virtual-pipeline-stage \(2\) must be at least --pipeline-model-parallel-size \(4\)",
    ),
    ({"distributed_timeout_minutes": 0.0}, "--distributed-timeout-minutes must be above 0"),
]


SHARDED_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"use_torch_fsdp2": True, "use_megatron_fsdp": True},
        "give --use-torch-fsdp2 or --use-megatron-fsdp, not both",
    ),
    (
        {"use_torch_fsdp2": True, "use_distributed_optimizer": True},
        "--use-torch-fsdp2 shards the optimizer's state itself, .* leave one of them out",
    ),
    (
        {"use_torch_fsdp2": True, "data_parallel_sharding_strategy": "optim"},
        "--data-parallel-sharding-strategy optim does not; leave one of them out",
    ),
    (
        {"torch_fsdp2_reshard_after_forward": False},
        "--no-torch-fsdp2-reshard-after-forward needs --use-torch-fsdp2",
    ),
    (
        {"num_distributed_optimizer_instances": 2},
        "--num-distributed-optimizer-instances 2 needs --use-distributed-optimizer or a --data-",
    ),
    ({"num_distributed_optimizer_instances": 0}, "optimizer-instances must be at least 1, got 0"),
    ({"overlap_param_gather": True}, "--overlap-param-gather needs --use-distributed-optimizer"),
    (
        {"use_torch_fsdp2": True, "ddp_pad_buckets_for_high_nccl_busbw": True},
        "nccl-busbw needs --use-distributed-optimizer",
    ),
]


@pytest.mark.parametrize(("options", "words"), SHARDED_REFUSED)
def test_what_shards_and_does_not_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataParallelConfig(**options)


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "no_shard"),
        ({"use_distributed_optimizer": True}, "optim"),
        (
            {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "no_shard"},
            "optim",
        ),
        ({"data_parallel_sharding_strategy": "optim"}, "optim"),
        ({"use_torch_fsdp2": True}, "optim_grads_params"),
        (
            {"use_torch_fsdp2": True, "torch_fsdp2_reshard_after_forward": False},
            "optim_grads",
        ),
        ({"use_megatron_fsdp": True, "use_distributed_optimizer": True}, "optim_grads_params"),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
            "optim_grads",
        ),
    ],
    ids=str,
)
def test_the_flags_of_megatron_ask_for_a_strategy(options: dict[str, Any], strategy: str) -> None:
    assert DataParallelConfig(**options).sharding == strategy


def test_stages_and_sharded_weights_exclude_each_other() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--use-torch-fsdp2 does not work with --pipeline-model-parallel-size \(2\)",
    ):
        ParallelConfig(
            pipeline_model_parallel_size=2, data_parallel=DataParallelConfig(use_torch_fsdp2=True)
        )


@pytest.mark.parametrize(
    ("model", "watch", "words"),
    [
        (
            {"cpu_offloading_num_layers": 1},
            {},
            r"--cpu-offloading-num-layers \(1\) and --use-torch-fsdp2: gathered weights would",
        ),
        (
            {},
            {"check_weight_hash_across_dp_replicas_interval": 5},
            "replicas-interval 5 and --use-torch-fsdp2: each rank keeps other rows",
        ),
    ],
)
def test_what_sharded_weights_exclude_is_refused(
    model: dict[str, Any], watch: dict[str, Any], words: str
) -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16}
    options = GPTConfig(**sizes, **model), WatchConfig(**watch)
    for data, is_refused in (
        (DataParallelConfig(use_torch_fsdp2=True), True),
        (DataParallelConfig(use_distributed_optimizer=True), False),
    ):
        parallel = ParallelConfig(data_parallel=data)
        with pytest.raises(ConfigError, match=words) if is_refused else nullcontext():
            check_sharding(options[0], parallel, options[1])


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**options)


MISFITS: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_model_parallel_size": 8},
        r"--num-attention-heads \(12\) must be divisible by .* \(8\); the nearest .* 6 or 12",
    ),
    (
        {"tensor_model_parallel_size": 6},
        r"--num-query-groups \(4\) must be divisible by .* \(6\); the nearest .* works: 4",
    ),
    (
        {"context_parallel_size": 3},
        r"--seq-length \(64\) must be divisible by 2 x .* \(6\).* 60 or 66.* works: 2 or 4",
    ),
    (
        {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "context_parallel_size": 32,
        },
        r"--seq-length \(64\) / .* \(32\) must be divisible by .* \(4\) under --sequence-parallel",
    ),
    (
        {"context_parallel_size": 8, "cp_comm_type": "a2a"},
        r"a2a: --num-attention-heads \(12\) must .* 6 or 12, or use --cp-comm-type p2p",
    ),
    (
        {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 4,
            "cp_comm_type": "a2a",
        },
        r"a2a: --num-attention-heads \(12\) / --tensor-model-parallel-size \(2\) must",
    ),
    (
        {"pipeline_model_parallel_size": 5},
        r"--num-layers \(12\) must be divisible by --pipeline-model-parallel-size \(5\)",
    ),
    (
        {"num_layers_per_virtual_pipeline_stage": 2},
        "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size above 1",
    ),
    (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 2,
            "num_virtual_stages_per_pipeline_rank": 3,
        },
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages.* give one",
    ),
]

SIZES: dict[str, Any] = {
    "num_layers": 12,
    "num_attention_heads": 12,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "seq_length": 64,
}


@pytest.mark.parametrize(("options", "words"), MISFITS)
def test_a_model_that_does_not_fit_is_refused_with_what_would(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_model(ParallelConfig(**options), **SIZES)


def test_the_feed_forward_width_and_the_vocabulary_are_cut_too() -> None:
    config = ParallelConfig(tensor_model_parallel_size=4)
    check_model(config, **SIZES, padded_vocab_size=128)
    with pytest.raises(ConfigError, match=r"--ffn-hidden-size \(50\) .* 2 or 5"):
        check_model(config, **{**SIZES, "ffn_hidden_size": 50})
    with pytest.raises(ConfigError, match=r"the padded vocabulary \(126\)"):
        check_model(config, **SIZES, padded_vocab_size=126)


def test_a_large_width_is_refused_at_once_with_its_divisors() -> None:
    config = ParallelConfig(tensor_model_parallel_size=4)
    width = 2**31 - 1  # a prime
    with pytest.raises(ConfigError, match=rf"works: 1 or {width}"):
        check_model(config, **{**SIZES, "ffn_hidden_size": width})


def test_a_fitting_model_is_taken() -> None:
    config = ParallelConfig(
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        tp_comm_overlap=True,
        context_parallel_size=2,
        pipeline_model_parallel_size=3,
        num_virtual_stages_per_pipeline_rank=2,
        microbatch_group_size_per_virtual_pipeline_stage=4,
    )
    check_model(config, **SIZES)
    assert config.model_ranks == 24
    assert config.order == DEFAULT_ORDER


def test_how_a_run_is_cut_is_no_part_of_its_identity() -> None:
    """A run may go on at other degrees."""
    cut = ParallelConfig(
        nproc_per_node=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        cp_comm_type="a2a",
    )
    assert digest_relevant(cut) == digest_relevant(ParallelConfig()) == {}


@pytest.mark.slow
def test_all_is_checked_before_torch_is_loaded() -> None:
    program = (
        "import sys; import trainyard.parallel.layout_checks, trainyard.parallel.dims; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
