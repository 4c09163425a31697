"""Gradients that nothing is added to stay in the format of the weights, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import digest, go, ledger
from tests.trainyard.training.test_same_bits_resumed import KINDS, SMALL
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.data.buffers import build_buckets

NAMES = ("bf16", "fp16", "hybrid, bf16", "experts", "fp8 delayed")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_one_micro_batch_has_the_bits_of_a_sum_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dtypes = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        buckets = build_buckets(*args, **kwargs)
        dtypes.append({bucket.grads.dtype for bucket in buckets})
        return buckets

    monkeypatch.setattr("trainyard.parallel.data.data_parallel.build_buckets", recorded)
    tokens = write_pair(tmp_path / "tokens", [40] * 60)
    options = {
        **SMALL,
        **KINDS[name],
        "bf16": name != "fp16",
        "micro_batch_size": 2,
        "global_batch_size": 2,
    }
    kept, summed = tmp_path / "kept", tmp_path / "summed"
    go(tokens, kept, **options)
    go(tokens, summed, **options, accumulate_allreduce_grads_in_fp32=True)
    narrow = torch.float16 if name == "fp16" else torch.bfloat16
    assert narrow in dtypes[0]
    assert dtypes[-1] == {torch.float32}
    assert ledger(kept) == ledger(summed)
    assert digest(kept) == digest(summed)


def test_what_is_added_up_or_computed_in_is_fp32() -> None:
    bf16, one = PrecisionConfig(bf16=True), {"num_microbatches": 1, "world_size": 1}
    assert bf16.keeps_gradients("adam", **one)
    assert not bf16.keeps_gradients("adam", num_microbatches=2, world_size=1)
    assert not bf16.keeps_gradients("adam", num_microbatches=1, world_size=2)
    assert not bf16.keeps_gradients("muon", **one)
    in_fp32 = PrecisionConfig(bf16=True, accumulate_allreduce_grads_in_fp32=True)
    assert not in_fp32.keeps_gradients("adam", **one)
