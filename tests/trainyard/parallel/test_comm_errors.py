"""What means that ranks could not talk to each other, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainyard.errors import CommunicationError
from trainyard.parallel.comm_errors import (
    communicating,
    communication_errors,
    is_communication_error,
)
from trainyard.parallel.tensor.mappings import reduce_from_tp
from trainyard.testing.pool import RankPool

LOST = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
    "NCCL communicator was aborted on rank 1.",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
    "Broken pipe",
    "Application timeout caused pair closure",
)

OURS = (
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    "expected scalar type Float but found BFloat16",
    "element 0 of tensors does not require grad and does not have a grad_fn",
    "CUDA error: device-side assert triggered",
    "Function 'MulBackward0' returned nan values in its 0th output.",
)


@pytest.mark.parametrize("text", LOST)
def test_words_of_gloo_and_nccl_are_known(text: str) -> None:
    with (
        pytest.raises(CommunicationError, match="rank 1 of 2 lost its connection"),
        communication_errors(1, 2),
    ):
        raise RuntimeError(text)


@pytest.mark.parametrize("text", OURS)
def test_defects_stay_defects(text: str) -> None:
    assert not is_communication_error(RuntimeError(text))
    with pytest.raises(RuntimeError, match=r"."), communication_errors(1, 2):
        raise RuntimeError(text)


def test_errors_of_torchs_stores_are_known_by_their_class() -> None:
    assert is_communication_error(dist.DistNetworkError("whatever"))
    assert not is_communication_error(ValueError("gloo"))


def test_memory_that_a_collective_lacks_is_no_lost_connection() -> None:
    with pytest.raises(torch.OutOfMemoryError), communicating("receiving F0"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_what_else_a_collective_raises_is_one() -> None:
    refusal = "receiving F0 failed: Connection closed by peer"
    with pytest.raises(CommunicationError, match=refusal), communicating("receiving F0"):
        raise RuntimeError("Connection closed by peer")


def lose_a_rank(seen: Path) -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        with communication_errors(0, 2):
            for _ in range(100):
                reduce_from_tp(torch.ones(4), dist.group.WORLD)
    except CommunicationError as error:
        seen.write_text(str(error))
        raise


@pytest.mark.distributed
def test_a_rank_lost_inside_a_layer_is_reported_by_the_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(Exception, match=r"."):
        ranks.run(lose_a_rank, 2, seen, timeout_seconds=30.0)
    assert "rank 0 of 2 lost its connection" in seen.read_text()
