"""Modules of Transformer Engine and mamba-ssm, as far as Megatron core builds models of them, in
plain torch.

`install` puts them where Megatron core imports them, so that its own classes for Transformer
Engine's layers, whose names its checkpoints have, run on a CPU. Parameters and their names are
Transformer Engine's; results are those of its formulas, on one rank."""

from __future__ import annotations

import importlib.machinery
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VERSION = "2.8.0"
"""The first with sinks."""


class Module(nn.Module):
    """Has a state, empty without FP8."""

    def get_extra_state(self) -> Tensor:
        """As of Transformer Engine 2."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


def _matrix(rows: int, columns: int, init: Any) -> nn.Parameter:
    weight = torch.empty(rows, columns)
    init(weight)
    return nn.Parameter(weight)


class LayerNorm(Module):
    kind = "LayerNorm"

    def __init__(self, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.size = eps, hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size))
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return _normalized(x, self.kind, self.weight, getattr(self, "bias", None), self.eps)


class RMSNorm(LayerNorm):
    kind = "RMSNorm"


def _normalized(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class Linear(Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.return_bias, self.parallel_mode = return_bias, parallel_mode
        self.weight = _matrix(out_features, in_features, init_method)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.return_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        **more: Any,
    ) -> None:
        super().__init__(in_features, out_features, **more)
        self.eps, self.normalization = eps, normalization
        matrix = dict(self.named_parameters())
        self._parameters.clear()  # those of the norm are registered first
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = (
            nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None
        )
        self.weight, self.bias = matrix["weight"], matrix.get("bias")

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return super().forward(_normalized(x, self.normalization, weight, bias, self.eps))


class GroupedLinear(Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        for i in range(num_gemms):
            setattr(self, f"weight{i}", _matrix(out_features, in_features, init_method))
            if bias:
                setattr(self, f"bias{i}", nn.Parameter(torch.zeros(out_features)))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """There is no FP8."""

    def forward(
        self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        parts = x.split(m_splits)
        biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        out = torch.cat([F.linear(*of_one) for of_one in zip(parts, weights, added, strict=True)])
        return (out, biases) if self.return_bias else out


def _without_own_state(module: nn.Module, keys: Any) -> None:
    """Older files lack its state."""
    keys.missing_keys[:] = [k for k in keys.missing_keys if "core_attention._extra_state" not in k]


class DotProductAttention(Module):
    """(s, b, n, d) each, grouped or not; returns (s, b, n d)."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        window_size: tuple[int, int] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        width = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.scale = softmax_scale or 1 / math.sqrt(width)
        self.window = window_size
        self.softmax_offset = None
        self.register_load_state_dict_post_hook(_without_own_state)
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str,
        core_attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        repeats = query.shape[2] // key.shape[2]
        k, v = (t.repeat_interleave(repeats, 2) for t in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, k) * self.scale
        if core_attention_bias is not None:
            scores = scores + core_attention_bias
        s, t = scores.shape[-2:]
        distance = torch.arange(s)[:, None] - torch.arange(t)
        hidden = torch.zeros(s, t, dtype=torch.bool) if attention_mask is None else attention_mask
        if "causal" in attn_mask_type:
            hidden = distance < 0
            if self.window is not None:
                hidden = hidden | (distance > self.window[0])
        scores = scores.masked_fill(hidden, -math.inf)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        shares = scores.softmax(-1)[..., :t]
        return torch.einsum("bnst,tbnd->sbnd", shares, v).flatten(2)


class GatedNorm(nn.Module):
    """RMSNorm of mamba-ssm, over groups, of what is gated."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        groups = (x * F.silu(z)).unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    chunk_size: int,
    *,
    dt_bias: Tensor,
    **more: Any,
) -> Tensor:
    """Mamba-2's recurrence, token after token. x: (b, s, n, p); dt: (b, s, n); inputs, outputs, of
    groups of heads: (b, s, g, k). more: `D`, what skips the state."""
    times = F.softplus(dt + dt_bias)
    repeats = x.shape[2] // inputs.shape[2]
    inputs, outputs = (t.repeat_interleave(repeats, 2) for t in (inputs, outputs))
    state, found = torch.zeros(()), []
    for t in range(x.shape[1]):
        new = (times[:, t, :, None] * x[:, t])[..., None] * inputs[:, t, :, None, :]
        state = state * torch.exp(times[:, t] * decay)[..., None, None] + new
        out = (state * outputs[:, t, :, None, :]).sum(-1)
        found.append(out + more["D"][:, None] * x[:, t])
    return torch.stack(found, 1)


class _Any(ModuleType):
    """A module of which every other name is a class that nothing here builds."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


MODULES = (
    *("pytorch", "common", "common.recipe", "pytorch.distributed"),
    *("pytorch.fp8", "pytorch.ops", "pytorch.float8_tensor", "pytorch.tensor"),
    *("pytorch.router",),
)
ABSENT = (
    *("pytorch.attention", "pytorch.optimizers", "pytorch.cpu_offload", "pytorch.permutation"),
    *("pytorch.cross_entropy", "pytorch.module", "pytorch.cpp_extensions"),
    *("pytorch.tensor.mxfp8_tensor", "pytorch.tensor.nvfp4_tensor"),
)
"""Modules that Megatron core does without."""


def install() -> None:
    """Make `import transformer_engine` give these."""
    root = _Any("transformer_engine")
    root.__version__ = VERSION
    root.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None)
    sys.modules["transformer_engine"] = root
    for name in MODULES:
        sys.modules[f"transformer_engine.{name}"] = module = _Any(f"transformer_engine.{name}")
        parent, _, last = f"transformer_engine.{name}".rpartition(".")
        setattr(sys.modules[parent], last, module)
    for name in ABSENT:
        sys.modules[f"transformer_engine.{name}"] = None  # type: ignore[assignment]
    ours = (LayerNorm, RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
    for made in ours:
        setattr(sys.modules["transformer_engine.pytorch"], made.__name__, made)
    for name in ("mamba_ssm", *(f"mamba_ssm.{rest}" for rest in ("ops", "ops.triton"))):
        sys.modules[name] = _Any(name)
    norm, combined = (
        _Any(f"mamba_ssm.ops.triton.{n}") for n in ("layernorm_gated", "ssd_combined")
    )
    norm.RMSNorm = GatedNorm
    combined.mamba_chunk_scan_combined = scan
    sys.modules |= {norm.__name__: norm, combined.__name__: combined}
