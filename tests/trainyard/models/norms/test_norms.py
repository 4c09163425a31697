"""Whose kernel normalises: the choice, its words, and that parameters and results are the same."""

from __future__ import annotations

import copy
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard.attention.select import Device
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.norm import NORMS
from trainyard.models.norms import kernels
from trainyard.models.norms.kernels import (
    ApexNorm,
    NormChoice,
    NormKernel,
    TransformerEngineNorm,
    Uncompiled,
    build_norm_kernel,
)
from trainyard.models.norms.select import NormNeeds, choose_norm, report_norm
from trainyard.testing.tolerances import FP32_SUM_ORDER

BARE, CPU = Device("cuda", (9, 0)), Device("cpu")
FULL = Device("cuda", (9, 0), transformer_engine=True, apex_norm=True, apex_fast_norm=True)
NO_CONTRIB = Device("cuda", (9, 0), apex_norm=True)
BF16: dict[str, Any] = {"normalization": "LayerNorm", "size": 4096, "dtype": "bfloat16"}

kinds = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
centredness = pytest.mark.parametrize("centred", [False, True], ids=["scale", "1p"])


def chosen(request: Any, device: Device, **needs: Any) -> tuple[str, str]:
    choice = choose_norm(request, device, NormNeeds(**(BF16 | needs)))
    return choice.backend, choice.kernel


# --- the choice -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, BARE, FULL, Device("mps")])
@pytest.mark.parametrize("request_", ["auto", "torch"])
def test_torch_is_what_is_taken_unless_another_is_asked_for(request_: str, device: Device) -> None:
    hard: dict[str, Any] = {"dtype": "float64", "fp32_input": True, "deterministic": True}
    assert chosen(request_, device, **hard) == ("torch", "layer_norm")
    assert chosen(request_, device, normalization="RMSNorm") == ("torch", "rms_norm")


@pytest.mark.parametrize(
    ("request_", "device", "needs", "kernel"),
    [
        ("apex", FULL, {}, "fast_layer_norm"),
        ("apex", FULL, {"size": 4000}, "fused_layer_norm"),
        ("apex", FULL, {"fp32_input": True}, "fused_layer_norm"),
        ("apex", FULL, {"fp32_input": True, "dtype": "float32"}, "fast_layer_norm"),
        ("apex", NO_CONTRIB, {}, "fused_layer_norm"),
        ("apex", FULL, {"normalization": "RMSNorm"}, "fused_rms_norm"),
        ("apex", FULL, {"dtype": "float64", "size": 7}, "fused_layer_norm"),
        ("transformer_engine", FULL, {}, "LayerNorm"),
        ("transformer_engine", FULL, {"normalization": "RMSNorm"}, "RMSNorm"),
        ("transformer_engine", FULL, {"dtype": "float32", "fp32_input": True}, "LayerNorm"),
    ],
)
def test_packages_are_taken_by_name(
    request_: str, device: Device, needs: dict[str, Any], kernel: str
) -> None:
    assert chosen(request_, device, **needs) == (request_, kernel)


@pytest.mark.parametrize(
    ("request_", "device", "needs", "words"),
    [
        ("apex", CPU, {}, "apex needs a CUDA device, not cpu"),
        ("apex", BARE, {}, "apex is not installed with its fused_layer_norm_cuda"),
        ("apex", FULL, {"deterministic": True}, "apex was not proved .*--deterministic-mode"),
        ("transformer_engine", CPU, {}, "Transformer Engine needs a CUDA device"),
        ("transformer_engine", NO_CONTRIB, {}, "Transformer Engine is not installed. Use"),
        ("transformer_engine", FULL, {"dtype": "float64"}, "computes in fp32, bf16 and fp16"),
        ("transformer_engine", FULL, {"fp32_input": True}, "--fp32-residual-connection"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(
    request_: str, device: Device, needs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        chosen(request_, device, **needs)
    assert str(refusal.value).startswith(f"--norm-backend {request_} is not available here")
    assert "--norm-backend auto" in str(refusal.value)


def test_the_reason_tells_what_compiling_has_to_do_with_it() -> None:
    def reason(request: Any, compiled: bool) -> str:
        return choose_norm(request, FULL, NormNeeds(**BF16, compiled=compiled)).reason

    assert "compiled with what stands around it" in reason("auto", compiled=True)
    assert "--compile-layers on makes it fast" in reason("auto", compiled=False)
    assert "compiled layers are cut in two" in reason("apex", compiled=True)
    assert reason("apex", compiled=False) == "asked for with --norm-backend apex"


def config(**changes: Any) -> GPTConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
    return GPTConfig(**(sizes | changes))


def test_one_line_says_what_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_norm(config(), torch.device("cpu"), torch.float32, compiled=False)
        report_norm(config(), torch.device("cpu"), torch.float32, compiled=False, say=False)
    assert caplog.messages == ["norm backend=torch kernel=layer_norm: the one for cpu"]


@kinds
def test_a_model_that_is_only_read_is_the_same_wherever_it_was_trained(kind: str) -> None:
    tokens = torch.arange(8).view(1, 8)
    results = []
    for backend in ("torch", "apex", "transformer_engine"):
        torch.manual_seed(1)
        model = GPTModel(config(norm_backend=backend, normalization=kind, qk_layernorm=True), 64)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        results.append((list(model.state_dict()), model.eval()(tokens)))
    for names, logits in results[1:]:
        assert names == results[0][0]
        assert torch.equal(logits, results[0][1])


# --- kernels of another --------------------------------------------------------------------------


class Plain:
    """A kernel written out."""

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        return x.dtype == weight.dtype

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        scale = weight + 1 if centred else weight
        if bias is None:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale + bias


def norms(kind: str, centred: bool, kernel: NormKernel) -> tuple[nn.Module, nn.Module]:
    """One by torch and one by the kernel, with the same random parameters."""
    ours = NORMS[kind](48, 1e-3, centred=centred)
    other = NORMS[kind](48, 1e-3, centred=centred, kernel=kernel)
    for number, parameter in enumerate(ours.parameters()):
        generator = torch.Generator().manual_seed(number)
        nn.init.normal_(parameter, generator=generator)
    other.load_state_dict(ours.state_dict())
    return ours, other


def passed(norm: Any, x: Tensor) -> list[Tensor]:
    """Output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = norm(x)
    factors = torch.linspace(-1, 2, out.numel()).view_as(out)
    grads = torch.autograd.grad((out * factors).sum(), [x, *norm.parameters()])
    return [out, *grads]


X = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(9)) * 2 + 1


@kinds
@centredness
def test_a_kernel_has_the_parameters_of_the_module(kind: str, centred: bool) -> None:
    ours, other = norms(kind, centred, Plain())
    assert list(other.state_dict()) == list(ours.state_dict())
    for got, right in zip(passed(other, X), passed(ours, X), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    wide = X.double()  # not taken
    assert torch.equal(other(wide), ours(wide))


@pytest.mark.slow
def test_a_compiler_leaves_a_kernel_alone() -> None:
    ours, other = norms("LayerNorm", True, Uncompiled(Plain()))

    class Around(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return functional.gelu(self.norm(2 * x)) + x

    torch._dynamo.reset()
    broken = Around(other)
    explained = torch._dynamo.explain(broken)(X)
    assert explained.graph_count == 2
    broken.forward = torch.compile(broken.forward, backend="aot_eager")  # type: ignore[method-assign]
    for got, right in zip(passed(broken, X), passed(Around(ours), X), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


# --- packages: called as they ask, on stand-ins with their arguments ---------------------------


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float) -> Tensor:
    return functional.layer_norm(x, tuple(shape), weight.to(x.dtype), bias.to(x.dtype), eps)


def rms_norm(x: Tensor, weight: Tensor, shape: Any, eps: float) -> Tensor:
    return functional.rms_norm(x, tuple(shape), weight.to(x.dtype), eps)


def apex_modules() -> dict[str, dict[str, Any]]:
    """Functions that apex exports, with the types that theirs return."""

    def fused_layer_norm_affine(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6
    ) -> Tensor:
        assert input.dtype == weight.dtype
        return layer_norm(input, weight, bias, normalized_shape, eps)

    def fused_rms_norm_affine(
        input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6
    ) -> Tensor:
        assert input.dtype == weight.dtype
        return rms_norm(input, weight, normalized_shape, eps)

    def mixed_dtype_fused_layer_norm_affine(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6
    ) -> Tensor:
        return layer_norm(input, weight, bias, normalized_shape, eps).to(weight.dtype)

    def mixed_dtype_fused_rms_norm_affine(
        input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6
    ) -> Tensor:
        return rms_norm(input, weight, normalized_shape, eps).to(weight.dtype)

    class FastLayerNormFN:
        @staticmethod
        def apply(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
            assert x.dtype == gamma.dtype
            return layer_norm(x, gamma, beta, gamma.shape, epsilon)

    return {
        "apex.normalization.fused_layer_norm": {
            f.__name__: f
            for f in (
                fused_layer_norm_affine,
                fused_rms_norm_affine,
                mixed_dtype_fused_layer_norm_affine,
                mixed_dtype_fused_rms_norm_affine,
            )
        },
        "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": FastLayerNormFN},
    }


class EngineFunction(torch.autograd.Function):
    """Backward takes the weight from the module, as Transformer Engine's operations do."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return engine_norm(module, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = engine_norm(ctx.module, x)
        return None, *torch.autograd.grad(out, [x, *ctx.module.parameters()], grad)


def engine_norm(module: Any, x: Tensor) -> Tensor:
    scale = module.weight + 1 if module.zero_centered_gamma else module.weight
    if hasattr(module, "bias"):
        return functional.layer_norm(x, scale.shape, scale, module.bias, module.eps)
    return functional.rms_norm(x, scale.shape, scale, module.eps)


class EngineRMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        assert dtype is None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        made = {"device": device, "dtype": params_dtype}
        self.weight = nn.Parameter(torch.ones(normalized_shape, **made))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = EngineFunction.apply(self, x, *self.parameters())  # type: ignore[no-untyped-call]
        return out


class EngineLayerNorm(EngineRMSNorm):
    def __init__(self, normalized_shape: int, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins where the packages would be."""
    engine = {"LayerNorm": EngineLayerNorm, "RMSNorm": EngineRMSNorm}
    for name, held in {**apex_modules(), "transformer_engine.pytorch": engine}.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        sys.modules[name].__dict__.update(held)
    loaded = (kernels._apex_functions, kernels._apex_fast)
    for cached in loaded:
        cached.cache_clear()
    yield
    for cached in loaded:
        cached.cache_clear()


class Anywhere:
    """A kernel for CUDA, off it."""

    def __init__(self, kernel: NormKernel) -> None:
        self.kernel = kernel
        self.takes = lambda x, weight: True

    def __call__(self, *arguments: Any) -> Tensor:
        return self.kernel(*arguments)


@kinds
@centredness
@pytest.mark.parametrize("package", [ApexNorm, TransformerEngineNorm])
def test_packages_are_called_with_our_parameters(
    packages: Any, package: Any, kind: str, centred: bool
) -> None:
    ours, other = norms(kind, centred, Anywhere(package()))
    assert list(other.state_dict()) == list(ours.state_dict())
    for _ in range(2):  # with the same parameters, and changed in place
        for got, right in zip(passed(other, X), passed(ours, X), strict=True):
            torch.testing.assert_close(got, right, **FP32_SUM_ORDER)
        for module in (ours, other):
            with torch.no_grad():
                module.weight.mul_(-0.5)
    copied = copy.deepcopy(other)
    with torch.no_grad():
        other.weight.zero_()
    for got, right in zip(passed(copied, X), passed(ours, X), strict=True):
        torch.testing.assert_close(got, right, **FP32_SUM_ORDER)


@centredness
def test_apexs_persistent_kernel_is_called_right(packages: Any, centred: bool) -> None:
    ours, other = norms("LayerNorm", centred, Anywhere(ApexNorm(fast=True)))
    for got, right in zip(passed(other, X), passed(ours, X), strict=True):
        torch.testing.assert_close(got, right, **FP32_SUM_ORDER)


@kinds
def test_apex_gives_the_type_of_the_weights_for_an_fp32_stream(packages: Any, kind: str) -> None:
    ours, other = (n.bfloat16() for n in norms(kind, False, Anywhere(ApexNorm())))
    got, right = other(X), ours(X)
    assert got.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(got, right)


def test_kernels_are_for_cuda_alone() -> None:
    for choice in (
        NormChoice("apex", "fast_layer_norm", ""),
        NormChoice("apex", "fused_rms_norm", ""),
        NormChoice("transformer_engine", "LayerNorm", ""),
    ):
        kernel = build_norm_kernel(choice)
        assert kernel is not None
        assert not kernel.takes(X, nn.Parameter(torch.ones(48)))
    assert build_norm_kernel(NormChoice("torch", "layer_norm", "")) is None
