"""Products by Transformer Engine: which of its quantizers a recipe asks for, and with what.

The package needs a GPU (tests/gpu/test_packages.py calls it). Here stand-ins with its names and
arguments compute by our own kernels, so a wrong operand, scale or layout gives other numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.attention.select import Device
from trainyard.errors import ConfigError
from trainyard.fp8 import blockwise, product
from trainyard.fp8.cast import FORWARD, WIDE, Fp8Pair, cast_pair, cast_scaled
from trainyard.fp8.delayed import DelayedScaling, advance_all
from trainyard.fp8.recipe import Fp8Recipe
from trainyard.models.fp8 import check_backend
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.tensor.fp8_linear import fp8_linear

S, B, IN, OUT = 64, 2, 256, 128
NUMBERS = {FORWARD: "kFloat8E4M3", WIDE: "kFloat8E5M2", torch.uint8: "kByte"}
RECIPES = [
    Fp8Recipe("hybrid"),
    Fp8Recipe("e4m3"),
    Fp8Recipe("hybrid", "delayed", history_length=2),
    Fp8Recipe("e4m3", "blockwise"),
]


def dtype_of(number: str) -> torch.dtype:
    return next(dtype for dtype, name in NUMBERS.items() if name == number)


class Quantizer:
    """`Quantizer` of transformer_engine.pytorch; `made` counts them by their names."""

    internal = False
    made: dict[str, int]

    def __init__(self, number: str) -> None:
        self.dtype = dtype_of(number)
        self.made[type(self).__name__] = self.made.get(type(self).__name__, 0) + 1

    def whole(self, pair: Fp8Pair) -> Any:
        assert self.internal
        rows, columns = (held.view(torch.uint8) for held in pair[:2])
        return SimpleNamespace(_data=rows, _transpose=columns, _scale_inv=pair[2].reshape(1))


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self, fp8_dtype: str, device: torch.device, *, rowwise: bool, columnwise: bool
    ) -> None:
        assert rowwise
        assert columnwise
        super().__init__(fp8_dtype)

    def __call__(self, x: Tensor) -> Any:
        return self.whole(cast_pair(x, self.dtype))


class Float8Quantizer(Quantizer):
    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: str, *, rowwise: bool, columnwise: bool
    ) -> None:
        assert scale.shape == amax.shape == (1,)
        assert rowwise
        assert columnwise
        super().__init__(fp8_dtype)
        self.scale = scale

    def __call__(self, x: Tensor) -> Any:
        return self.whole(cast_scaled(x, self.scale.reshape(()), self.dtype))


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype: str,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        assert rowwise
        assert columnwise
        assert force_pow_2_scales
        super().__init__(fp8_dtype)
        self.dim = block_scaling_dim

    def __call__(self, x: Tensor) -> Any:
        cast = {1: blockwise.cast_tiles, 2: blockwise.cast_blocks}[self.dim]
        rows, columns, row_scale, column_scale = cast(x, self.dtype)
        return SimpleNamespace(
            _rowwise_data=rows.view(torch.uint8),
            _columnwise_data=columns.view(torch.uint8),
            _rowwise_scale_inv=row_scale,
            _columnwise_scale_inv=column_scale,
        )


class Stored:
    """`Float8TensorStorage` and `Float8BlockwiseQTensorStorage`."""

    def __init__(self, *, fp8_dtype: str, fake_dtype: torch.dtype, **held: Any) -> None:
        data = held["data"] if "data" in held else held["rowwise_data"]
        assert data.dtype == torch.uint8
        self.values = data.view(dtype_of(fp8_dtype))
        self.is_whole = "data" in held
        self.inverse = held["fp8_scale_inv"] if self.is_whole else held["rowwise_scale_inv"]
        if self.is_whole:
            assert self.inverse.shape == (1,)
            self.inverse = self.inverse.reshape(())
        else:
            is_of_blocks = blockwise.is_of_blocks(self.values, self.inverse)
            assert held["is_2D_scaled"] == is_of_blocks


def general_gemm(
    A: Stored,  # noqa: N803
    B: Stored,  # noqa: N803
    out_dtype: torch.dtype,
    layout: str,
    bias: Tensor | None,
    use_split_accumulator: bool,
) -> tuple[Tensor, None, None, None]:
    assert layout == "TN"
    operands = (B.values, A.values, B.inverse, A.inverse)
    made = product.scaled_product(*operands, out_dtype, bias=bias, fast=not use_split_accumulator)
    return made, None, None, None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The package's names; returns how many quantizers of each kind were made."""

    def module(name: str, **held: Any) -> ModuleType:
        found = ModuleType(f"transformer_engine{name}")
        vars(found).update(held)
        monkeypatch.setitem(sys.modules, found.__name__, found)
        return found

    Quantizer.made = {}
    kinds = (Float8CurrentScalingQuantizer, Float8Quantizer, Float8BlockQuantizer)
    module("")
    module(".pytorch", **{kind.__name__: kind for kind in kinds})
    module(".pytorch.constants", TE_DType=NUMBERS)
    module(".pytorch.cpp_extensions", general_gemm=general_gemm)
    module(".pytorch.tensor")
    module(
        ".pytorch.tensor.storage",
        float8_tensor_storage=SimpleNamespace(Float8TensorStorage=Stored),
        float8_blockwise_tensor_storage=SimpleNamespace(Float8BlockwiseQTensorStorage=Stored),
    )
    return Quantizer.made


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scaling} {r.format}")
def test_a_recipe_is_a_quantizer_and_operands_stand_where_ours_do(
    recipe: Fp8Recipe, made: dict[str, int]
) -> None:
    found = []
    for backend in ("torch", "transformer_engine"):
        of_backend = replace(recipe, backend=backend)  # type: ignore[arg-type]
        scaling = None
        if recipe.scaling == "delayed":
            scaling = DelayedScaling(of_backend, torch.device("cpu"))
        for _ in range(2):  # delayed scales of the second step are of the first
            x, weight, bias = draw(S, B, IN, seed=1), draw(OUT, IN, seed=2), draw(OUT, seed=3)
            leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
            y = fp8_linear(x, weight, bias, of_backend, scaling)
            y.backward(draw(S, B, OUT, seed=4))
            advance_all([] if scaling is None else [scaling], None)
        found.append((y, *(leaf.grad for leaf in leaves)))
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
    name = {
        "tensorwise": "Float8CurrentScalingQuantizer",
        "delayed": "Float8Quantizer",
        "blockwise": "Float8BlockQuantizer",
    }[recipe.scaling]
    assert made == {name: 2 * 3}  # two steps; input, weight, gradient


def test_a_package_that_is_not_here_is_refused_in_words() -> None:
    recipe = Fp8Recipe("hybrid", backend="transformer_engine")
    check_backend(Fp8Recipe("hybrid"), Device("cpu"))
    check_backend(recipe, Device("cuda", transformer_engine=True))
    with pytest.raises(ConfigError, match=r"Engine is not installed\. Leave it out, or give torch"):
        check_backend(recipe, Device("cuda"))
    with pytest.raises(ConfigError, match="Engine needs a CUDA device, not cpu"):
        check_backend(recipe, Device("cpu"))


def test_the_option_is_part_of_the_recipe() -> None:
    options: dict[str, Any] = {"bf16": True, "fp8_format": "hybrid"}
    for recipe in ("tensorwise", "delayed"):
        fp8 = PrecisionConfig(**options, fp8_recipe=recipe, fp8_backend="transformer_engine").fp8
        assert fp8 is not None
        assert fp8.backend == "transformer_engine"
    unset = PrecisionConfig(**options).fp8
    assert unset is not None
    assert unset.backend == "torch"
    with pytest.raises(ConfigError, match="transformer_engine has no recipe rowwise"):
        PrecisionConfig(**options, fp8_recipe="rowwise", fp8_backend="transformer_engine")
