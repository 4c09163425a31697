"""What a run says of kernels and of figures of speed at its start, and what it refuses there."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainyard.training.test_pretrain_api import MODEL, TRAINING, counting, options
from trainyard.errors import ConfigError
from trainyard.models.costs.flops import MODEL_FLOPS
from trainyard.models.family import GIVEN, PER_PARAMETER
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.parallel.model import ALONE
from trainyard.training.logging.run_info import RunInfo
from trainyard.training.loop.build import report_kernels
from trainyard.training.overrides import Overrides
from trainyard.training.pretrain import pretrain

CPU = torch.device("cpu")
ON_CPU = replace(TRAINING, device="cpu")
KERNELS = [
    "attention backend=sdpa kernel=cpu: the one for cpu",
    "norm backend=torch kernel=layer_norm: the one for cpu",
    "optimizer=adam backend=torch kernel=fused_adamw: the one for cpu",
]


@pytest.mark.parametrize(
    ("is_built_in", "say", "lines"),
    [(True, True, KERNELS), (False, True, KERNELS[2:]), (True, False, [])],
)
def test_one_rank_logs_the_chosen_kernels(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_built_in: bool,
    say: bool,
    lines: list[str],
) -> None:
    with caplog.at_level(logging.INFO):
        report_kernels(options(tmp_path), ALONE, CPU, is_built_in=is_built_in, say=say)
    assert caplog.messages == lines


@pytest.mark.parametrize(
    ("recipe", "sharding", "words"),
    [
        ("tensorwise", "use_distributed_optimizer", ""),
        ("delayed", "use_distributed_optimizer", "no effect with --fp8-recipe delayed, whose"),
        ("rowwise", "use_distributed_optimizer", "no effect with --fp8-recipe rowwise, whose"),
        ("tensorwise", "use_torch_fsdp2", "no effect where gradients or weights are sharded"),
        ("tensorwise", "use_megatron_fsdp", "no effect where gradients or weights are sharded"),
    ],
)
def test_what_gathers_no_weights_in_8_bits_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recipe: Any, sharding: str, words: str
) -> None:
    asked: dict[str, Any] = {"fp8_param_gather": True, sharding: True}
    gathered = ParallelConfig(data_parallel=DataParallelConfig(**asked))
    config = options(
        tmp_path,
        model=replace(MODEL, hidden_size=32, num_attention_heads=2, seq_length=16),
        precision=PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe=recipe),
        parallel=gathered,
    )
    with caplog.at_level(logging.INFO):
        report_kernels(config, ALONE, CPU, is_built_in=False, say=True)
    said = [line for line in caplog.messages if line.startswith("--fp8-param-gather")]
    if not words:
        assert said == []
        return
    (line,) = said
    assert line.startswith(f"--fp8-param-gather: {words}")
    assert "weights are gathered in bf16" in line


def test_a_run_logs_kernels_and_conventions_before_its_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        pretrain(None, counting, options(tmp_path, training=ON_CPU))
    begin = next(i for i, line in enumerate(caplog.messages) if line.startswith("training param"))
    assert [line for line in caplog.messages if "backend=" in line] == KERNELS
    assert set(KERNELS) <= set(caplog.messages[:begin])
    (speed,) = (line for line in caplog.messages if line.startswith("TFLOP/s count by"))
    assert speed.startswith("TFLOP/s count by 6N+causal (6 for each matrix weight and token")
    assert speed.endswith("no MFU, as the peak of cpu is not known")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"model": replace(MODEL, norm_backend="apex")}, "--norm-backend apex"),
        (
            {"model": replace(MODEL, norm_backend="transformer_engine")},
            "--norm-backend transformer_engine",
        ),
        (
            {"optimizer": OptimizerConfig(lr=1e-2, optimizer_backend="apex")},
            "--optimizer-backend apex",
        ),
    ],
)
def test_an_unavailable_kernel_ends_the_run_before_any_work(
    tmp_path: Path, others: dict[str, Any], words: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"{words} is not available here: .* needs a CUDA device, not cpu"
    ):
        pretrain(None, counting, options(tmp_path, training=ON_CPU, **others))
    assert not list(tmp_path.glob("iter_*"))


def test_the_flop_convention_is_that_of_the_model() -> None:
    def model(parallel: Any, pipeline_stage: Any) -> nn.Module:
        raise AssertionError

    assert Overrides().flop_convention(MODEL) is MODEL_FLOPS
    assert (
        Overrides(flops_per_token=7.0).flop_convention(MODEL) is MODEL_FLOPS
    )  # a GPT counts its own
    assert Overrides(model_provider=model).flop_convention(MODEL) is PER_PARAMETER
    assert Overrides(model_provider=model, flops_per_token=7.0).flop_convention(MODEL) is GIVEN


def test_the_peak_is_logged_with_the_convention() -> None:
    info = RunInfo(1, device_name="NVIDIA H200", flops=PER_PARAMETER)
    assert info.conventions() == (
        "6N (6 for each parameter and token, attention and recompute not); "
        "MFU is the share of the dense bf16 peak of the datasheet, 989.4 TFLOP/s"
    )


def test_arguments_in_another_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes a PretrainConfig last, not function"):
        pretrain(None, None, counting)  # type: ignore[arg-type]
