"""--deterministic-mode: two runs are equal bit for bit; settings that prevent it are refused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.stages.directly import run_process
from tests.stages.pretrain_runs import Pretrain, arguments, manifest
from trainyard.artifacts.parts import files_of_part

OPTIONS: dict[str, Any] = {"deterministic_mode": True, "train_iters": 4, "save_interval": 2}
"""With dropout and clipping, as by default."""


def assert_same_bits(one: Path, other: Path) -> None:
    """Ledger and all that a step holds: weights, moments, states."""
    assert (one / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    first, second = manifest(one), manifest(other)
    kept = []
    for run, found in ((one, first), (other, second)):
        of_steps = (files_of_part(str(run), part) for part in found.parts)
        files = (*found.files, *chain.from_iterable(of_steps))
        kept.append({file.path: file.digest for file in files if not file.volatile})
    assert kept[0] == kept[1]
    assert any(path.endswith(".safetensors") for path in kept[0]), "weights are compared too"
    assert first.output_digest == second.output_digest


@pytest.mark.slow
def test_two_runs_write_the_same_bits(pretrain: Pretrain, tmp_path: Path) -> None:
    for name in ("one", "other"):
        pretrain(tmp_path / name, **OPTIONS)
    assert_same_bits(tmp_path / "one", tmp_path / "other")


CUTS: dict[str, dict[str, Any]] = {
    "tp2": {"nproc_per_node": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp2": {"nproc_per_node": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "tp2 dp2 bf16": {
        "nproc_per_node": 4,
        "tensor_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "bf16": True,
    },
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cut", CUTS)
def test_two_runs_of_several_ranks_are_equal(cut: str, tokens: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        run_process(
            "stages.pretrain",
            *arguments(tokens, tmp_path / name, **OPTIONS, **CUTS[cut]),
            seconds=240,
        )
    assert_same_bits(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
def test_nccl_algorithms_without_a_fixed_order_are_refused(
    pretrain: Pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring,NVLS")
    log = pretrain(tmp_path / "run", **OPTIONS, expect=2)
    assert "--deterministic-mode with NCCL_ALGO=Ring,NVLS: sums may differ" in log
    assert "leave it unset for ^NVLS" in log
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
