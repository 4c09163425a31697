"""Ranks that hang, replicas that differ, memory that runs out."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.trainyard.training.small_gpt import (
    MODEL,
    VOCAB,
    Collector,
    build_loop,
    build_train_module,
)
from trainyard.errors import ConfigError, HangError, HostMemoryError, InfrastructureError
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.dims import ParallelDims
from trainyard.testing.pool import RankPool
from trainyard.training.loop.state import TrainState
from trainyard.training.options.watch import WatchConfig
from trainyard.training.watch.hang import HangWatch, RankPosition, summary
from trainyard.training.watch.memory import (
    MemoryPlan,
    helpful_flags,
    is_out_of_memory,
    out_of_memory_explained,
    parallel_layout_of,
    peak_lines,
    plan_memory,
)
from trainyard.training.watch.memory_monitor import MemoryMonitor
from trainyard.training.watch.rank_mailbox import LocalMailbox
from trainyard.training.watch.replicas import checksum, checksums, first_difference

CPU = torch.device("cpu")

# --- hangs ------------------------------------------------------------------------------------


def test_all_ranks_write_stacks_and_the_rank_behind_is_named(tmp_path: Path) -> None:
    ended: list[InfrastructureError] = []
    watches: list[HangWatch] = []
    mailbox, over = LocalMailbox(), threading.Event()

    def stuck_rank(rank: int) -> None:
        watch = HangWatch(
            *(rank, 2, mailbox, tmp_path, 0.2 / 60),
            end=ended.append,
            poll_seconds=0.02,
            grace_seconds=2.0,
        )
        watches.append(watch)
        watch.begin(TrainState(step=4 - rank))
        wait_for_the_others(over) if rank == 0 else read_a_broken_disk(over)

    threads = [threading.Thread(target=stuck_rank, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    wait_for(ended, 2)
    over.set()
    for thread in threads:
        thread.join()
    assert [type(error) for error in ended] == [HangError] * 2
    text = str(ended[0])
    assert "rank 1 is behind, after step 3 in read_a_broken_disk" in text
    assert "rank 0 is behind" not in text
    for rank in (0, 1):
        stacks = (tmp_path / f"stacks-rank{rank:04d}.txt").read_text()
        assert "read_a_broken_disk" in stacks
        assert "wait_for_the_others" in stacks


def wait_for(ended: list[InfrastructureError], count: int) -> None:
    deadline = time.monotonic() + 20
    while len(ended) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def wait_for_the_others(over: threading.Event) -> None:
    over.wait(20)


def read_a_broken_disk(over: threading.Event) -> None:
    over.wait(20)


class Unreachable:
    """A mailbox whose rank is gone."""

    def put(self, name: str, text: str) -> None:
        raise RuntimeError("Broken pipe")

    def read(self, name: str) -> str | None:
        raise RuntimeError("Broken pipe")

    def append(self, name: str, text: str) -> None:
        raise RuntimeError("Broken pipe")

    def claim(self, name: str, text: str) -> str:
        raise RuntimeError("Broken pipe")


def test_without_the_store_a_rank_reports_only_itself(tmp_path: Path) -> None:
    ended: list[InfrastructureError] = []
    watch = HangWatch(1, 2, Unreachable(), tmp_path, 0.1 / 60, end=ended.append, poll_seconds=0.02)
    watch.begin(TrainState(step=3))
    wait_for(ended, 1)
    watch.end()
    assert "rank 1 after step 3" in str(ended[0])
    assert "rank 0, which keeps the messages of ranks, does not answer" in str(ended[0])


@pytest.mark.slow
def test_progress_prevents_the_alarm(tmp_path: Path) -> None:
    ended: list[InfrastructureError] = []
    watch = HangWatch(0, 1, LocalMailbox(), tmp_path, 0.3 / 60, end=ended.append, poll_seconds=0.01)
    watch.begin(TrainState())
    for _ in range(20):
        time.sleep(0.03)
        watch.beat()
    watch.end()
    assert ended == []
    assert not list(tmp_path.iterdir())


def test_the_default_timeout_follows_from_the_steps(tmp_path: Path) -> None:
    watch = HangWatch(0, 1, LocalMailbox(), tmp_path)
    collector = Collector([])
    build_loop(build_train_module(), callbacks=[collector]).run()
    assert watch.limit_seconds() is None
    for event in collector.events[:3]:
        watch.after_step(event)
    assert watch.limit_seconds() == 3600.0  # a checkpoint may be under way
    watch.beat()
    assert watch.limit_seconds() == 600.0
    assert HangWatch(0, 1, LocalMailbox(), tmp_path, 0).limit_seconds() is None


def test_a_rank_that_computes_is_named_before_those_that_wait() -> None:
    waiting = [
        RankPosition(rank, 5, "all_reduce_sum (parallel/data.py:1)", True) for rank in (0, 2)
    ]
    busy = RankPosition(1, 5, "forward (models/mlp.py:3)", False)
    assert "rank 1 is behind, after step 5 in forward" in summary([*waiting, busy], 3, 60.0)
    assert "all wait: rank 0 after step 5" in summary(
        [*waiting, RankPosition(1, 5, "x", True)], 3, 60.0
    )
    assert "rank 1 does not answer" in summary(waiting, 3, 60.0)


# --- replicas ---------------------------------------------------------------------------------


def test_a_checksum_depends_on_every_bit_and_position() -> None:
    values = torch.arange(10.0)
    flipped = values.clone()
    flipped.view(torch.int32)[3] ^= 1
    swapped = values[torch.tensor([1, 0, *range(2, 10)])]
    found = {int(checksum(t)) for t in (values, flipped, swapped, -values, values.bfloat16())}
    assert len(found) == 5
    assert int(checksum(values)) == int(checksum(values.clone()))


def test_the_first_parameter_that_differs_is_named_with_the_odd_replica() -> None:
    same = [("a", 1), ("b", 2), ("c", 3)]
    odd = [("a", 1), ("b", 7), ("c", 8)]
    assert first_difference([same, same, same]) is None
    assert first_difference([same, odd, same]) == ("b", [1])


def check_replicas() -> str:
    import torch.distributed as dist

    from trainyard.parallel.dims import ParallelDims
    from trainyard.parallel.groups import build_groups
    from trainyard.training.watch.replicas import ReplicaCheck

    train_module, collector = build_train_module(), Collector([])
    groups = build_groups(ParallelDims(dp=dist.get_world_size()), dist.get_rank())
    check = ReplicaCheck(train_module, groups, 2)
    build_loop(build_train_module(), callbacks=[collector]).run()
    for event in collector.events[:2]:
        check.after_step(event)
    name, parameter = list(train_module.chunks[0].named_parameters())[5]
    if dist.get_rank() == 1:
        parameter.data.view(-1)[0] += 1e-6
    try:
        check.after_step(collector.events[3])
    except InfrastructureError as error:
        return f"{name}: {error}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_replica_that_drifted_ends_the_run(ranks: RankPool) -> None:
    texts = ranks.run(check_replicas, 3)
    assert len(set(texts)) == 1
    name, _, text = texts[0].partition(": ")
    assert f"step 4: {name} is not the same" in text
    assert "rank 1 differs from the other ranks of [0, 1, 2]" in text


def test_checksums_are_by_name() -> None:
    train_module = build_train_module()
    assert [name for name, _ in checksums(train_module.chunks[0].named_parameters())] == [
        name for name, _ in train_module.chunks[0].named_parameters()
    ]


# --- memory -----------------------------------------------------------------------------------

BF16 = PrecisionConfig(bf16=True)


def test_the_memory_plan_follows_the_formulas() -> None:
    whole = plan_memory(MODEL, VOCAB, ParallelLayout(), BF16)
    assert whole.gradients == 2 * whole.parameters
    assert whole.optimizer == 6 * whole.parameters
    sharded = plan_memory(MODEL, VOCAB, ParallelLayout(dp=4, sharding="optim"), BF16)
    assert sharded.optimizer == whole.optimizer / 4
    assert (
        plan_memory(MODEL, VOCAB, ParallelLayout(cp=2), BF16).activations == whole.activations / 2
    )
    aware = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    narrow = plan_memory(MODEL, VOCAB, ParallelLayout(), PrecisionConfig(bf16=True, **aware))
    assert narrow.optimizer == 5 * whole.parameters
    single = plan_memory(MODEL, VOCAB, ParallelLayout(), PrecisionConfig())
    assert single.parameters + single.gradients + single.optimizer == 16 / 18 * (
        whole.parameters + whole.gradients + whole.optimizer
    )
    (line,) = whole.lines()
    assert line.startswith("memory in theory, most loaded rank (GB): ")


def test_the_layout_follows_from_the_options() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True
    )
    layout = parallel_layout_of(MODEL, parallel, ParallelDims(dp=3, tp=2, pp=2), 4, 6)
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch_size) == (2, 2, 3, 4)
    assert layout.sequence_parallel


def ask_for(num_bytes: int) -> RuntimeError:
    """What torch says of memory that is not there."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(num_bytes, dtype=torch.uint8)
    return raised.value


def explained(
    error: Exception, plan: MemoryPlan | None, layout: ParallelLayout, device: torch.device = CPU
) -> str:
    """The message of an error on rank 1 of 2."""
    with (
        pytest.raises(HostMemoryError) as raised,
        out_of_memory_explained(1, 2, device, lambda: (plan, layout)),
    ):
        raise error
    return str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ask_for(10**16),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
)
def test_an_out_of_memory_error_has_allocation_plan_and_remedies(error: Exception) -> None:
    layout = ParallelLayout(micro_batch_size=4, dp=2)
    assert is_out_of_memory(error)
    text = explained(error, plan_memory(MODEL, VOCAB, layout, BF16), layout)
    assert "rank 1 ran out of memory on the host" in text
    assert "GB resident in this process" in text
    assert "the plan was" in text
    for flag in (
        "--use-distributed-optimizer",
        "--recompute-activations",
        "--micro-batch-size 2",
        "--tensor-model-parallel-size 2",
    ):
        assert flag in text


def test_without_formulas_the_error_has_no_plan() -> None:
    text = explained(MemoryError(), None, ParallelLayout(micro_batch_size=4, dp=2))
    assert "the plan" not in text
    assert "--use-distributed-optimizer;" in text
    assert text.index("--micro-batch-size 2") < text.index("--use-distributed-optimizer")


def test_host_memory_beside_a_gpu_has_its_own_remedies() -> None:
    layout = ParallelLayout(micro_batch_size=4, dp=2)
    plan = plan_memory(MODEL, VOCAB, layout, BF16)
    text = explained(ask_for(10**16), plan, layout, torch.device("cuda", 0))
    assert "rank 1 ran out of memory on the host" in text
    assert "--num-workers" in text
    assert "--micro-batch-size" not in text
    assert "the plan was" not in text


def test_options_in_use_are_not_suggested() -> None:
    layout = ParallelLayout(
        dp=2, tp=2, sequence_parallel=True, recompute="full", sharding="optim_grads_params"
    )
    plan = plan_memory(MODEL, VOCAB, layout, BF16)
    assert helpful_flags(layout, plan, 2) == [
        "more devices, with --use-distributed-optimizer or a larger --tensor-model-parallel-size"
    ]
    with (
        pytest.raises(RuntimeError, match="shape"),
        out_of_memory_explained(0, 1, CPU, lambda: (plan, layout)),
    ):
        raise RuntimeError("shape mismatch")


def test_memory_is_recorded_during_the_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "memory-rank0000.jsonl"
    monitor = MemoryMonitor(path, CPU, 0.01)
    build_loop(build_train_module(), callbacks=[monitor]).run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) >= 2
    assert lines[-1]["rss_bytes"] > 10**7
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_an_unwritable_folder_only_ends_the_monitor(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monitor = MemoryMonitor(tmp_path / "file" / "memory.jsonl", CPU, 0.01)
    assert build_loop(build_train_module(), callbacks=[monitor]).run() == "finished"


def test_peaks_name_the_worst_rank() -> None:
    assert peak_lines([10**9, 3 * 10**9]) == [
        "peak memory (GB): 3.00 on rank 1 | by rank: 0: 1.00, 1: 3.00"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"check_weight_hash_across_dp_replicas_interval": 0}, "replicas-interval"),
        ({"straggler_minmax_count": 0}, "--straggler-minmax-count"),
        ({"hang_timeout_minutes": -1.0}, "--hang-timeout-minutes"),
        ({"check_for_spiky_loss": True, "rerun_mode": "disabled"}, "--rerun-mode"),
    ],
)
def test_invalid_watch_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WatchConfig(**options)  # type: ignore[arg-type]
