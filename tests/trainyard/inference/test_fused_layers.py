"""Which models a step of fused kernels takes: all others would get wrong tokens from it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.trainyard.inference.small_models import LLAMA, SIZES
from trainyard.inference import fused_layers
from trainyard.inference.fused_layers import can_fuse
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.moe_config import MoEConfig

FITS: dict[str, Any] = SIZES | LLAMA
FITS |= {"num_layers": 2, "hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 256}


def fuses(
    options: dict[str, Any],
    rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
) -> bool:
    """The answer for a model on the CPU that says it is on a GPU."""
    model = GPTModel(GPTConfig(**options), 256).to(dtype)
    cuda = mock.PropertyMock(return_value=torch.device("cuda"))
    with (
        mock.patch.object(GPTModel, "device", cuda),
        mock.patch.object(fused_layers, "TRITON", True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        return can_fuse(model, rows)


def test_a_llama_fits() -> None:
    assert fuses(FITS)
    assert fuses(FITS, rows=64, capability=(10, 0))


@pytest.mark.parametrize(
    "other",
    [
        {"disable_bias_linear": False},
        {"add_qkv_bias": True},
        {"qk_layernorm": True},
        {"qk_l2_norm": True},
        {"window_size": "5,0"},
        {"softmax_type": "learnable"},
        {"rotary_percent": 0.5},
        {"rotary_interleaved": True},
        {"swiglu": False},
        {"apply_layernorm_1p": True},
        {"normalization": "LayerNorm"},
        {"fp32_residual_connection": True},
        {"moe": MoEConfig(num_experts=4, moe_router_topk=2)},
        {"kv_channels": 16},
        {"ffn_hidden_size": 192},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_the_kernels_do_not_compute_does_not(other: dict[str, Any]) -> None:
    assert not fuses(FITS | other)


@pytest.mark.parametrize(
    "given",
    [{"rows": 65}, {"dtype": torch.float16}, {"capability": (12, 0)}, {"capability": (8, 0)}],
    ids=lambda given: next(iter(given)),
)
def test_other_batches_numbers_and_devices_do_not(given: dict[str, Any]) -> None:
    assert not fuses(FITS, **given)
