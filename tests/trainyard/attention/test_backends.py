"""Every backend that runs here against attention written out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.trainyard.attention.cases import (
    KINDS,
    LOCAL,
    attend,
    attend_biased,
    expected,
    expected_biased,
    inputs,
    masks,
    some_bias,
)
from trainyard.attention import lse_kernels, varlen
from trainyard.attention.base import Numerics, Softmax
from trainyard.attention.flash import FlashBackend
from trainyard.attention.local import LocalBackend
from trainyard.attention.lse_kernels import BlockCall, Saved, block_backward, block_forward
from trainyard.attention.masks import CAUSAL, AttentionMask, cross_mask
from trainyard.attention.sdpa import SdpaBackend, even_gradient
from trainyard.testing.tolerances import FP32_SUM_ORDER

S = 24
LENGTHS = torch.tensor([7, S])
BACKENDS = {"cpu": SdpaBackend("cpu"), "unfused": SdpaBackend("math", True), "local": LOCAL}

each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
each_mask = pytest.mark.parametrize("kind", KINDS)
each_sink = pytest.mark.parametrize("with_sink", [False, True], ids=["vanilla", "sink"])
each_group = pytest.mark.parametrize("groups", [4, 2, 1])


def compare(backend: Any, given: list[Tensor], mask: AttentionMask, with_sink: bool) -> None:
    found, right = attend(backend, given, mask, with_sink), expected(given, mask, with_sink)
    for got, wanted in zip([found[0], *found[1]], [right[0], *right[1]], strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), **FP32_SUM_ORDER)


@pytest.mark.few_cases(12)
@each_backend
@each_mask
@each_sink
@each_group
def test_backends_agree(backend: Any, kind: str, with_sink: bool, groups: int) -> None:
    compare(backend, inputs(S, groups=groups), masks(S)[kind], with_sink)


@pytest.mark.few_cases(6)
@each_backend
@each_sink
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "matrix"])
def test_queries_are_the_last_of_the_keys(backend: Any, kind: str, with_sink: bool) -> None:
    compare(backend, inputs(5, S, groups=2), masks(S)[kind], with_sink)


@pytest.mark.few_cases(6)
@each_backend
@each_group
@pytest.mark.parametrize("kind", ["causal", "full", "documents", "matrix"])
def test_a_bias_is_added_to_scores(backend: Any, kind: str, groups: int) -> None:
    given, mask, bias = inputs(S, groups=groups), masks(S)[kind], some_bias(S, S)
    found, right = (
        attend_biased(backend, given, mask, bias),
        expected_biased(given, mask, bias),
    )
    for got, wanted in zip(found, right, strict=True):
        assert wanted.abs().max() > 0.1
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.few_cases(4)
@each_backend
@each_sink
@pytest.mark.parametrize("s", [S, 5])
def test_queries_of_another_sequence_see_no_padding(backend: Any, s: int, with_sink: bool) -> None:
    compare(backend, inputs(s, S, groups=2), cross_mask(LENGTHS, s, S), with_sink)


@pytest.mark.few_cases(4)
@each_backend
@each_mask
def test_heads_do_not_see_each_other(backend: Any, kind: str) -> None:
    q, k, v, sink = (x.detach() for x in inputs(S))
    order, mask = torch.tensor([2, 0, 3, 1]), masks(S)[kind]
    softmax = Softmax(0.25)
    out = backend.attend(q, k, v, mask, softmax._replace(sink=sink))
    moved = [x[:, order] for x in (q, k, v)]
    permuted = backend.attend(*moved, mask, softmax._replace(sink=sink[order]))
    torch.testing.assert_close(permuted, out[:, order], **FP32_SUM_ORDER)


@pytest.mark.slow
@each_backend
@each_sink
def test_a_compiler_takes_backends_whole(backend: Any, with_sink: bool) -> None:
    given = inputs(8, groups=2)
    torch._dynamo.reset()

    def doubled(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: AttentionMask) -> Tensor:
        out: Tensor = backend.attend(q, k, v, mask, Softmax(0.25, sink=sink if with_sink else None))
        return 2 * out

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager", dynamic=False)
    for kind in ("causal", "documents and window"):
        mask = masks(8)[kind]
        plain, other = doubled(*given, mask), compiled(*given, mask)
        torch.testing.assert_close(other, plain)
        found, right = (torch.autograd.grad(x.sum(), given[:3]) for x in (other, plain))
        torch.testing.assert_close(found, right)


def test_scaling_by_the_layer_changes_rounding_alone() -> None:
    given = [x.detach() for x in inputs(S)]
    softmax = Softmax(0.25)
    scaled = LocalBackend(Numerics(layer_scaling=7)).attend(*given[:3], CAUSAL, softmax)
    plain = LOCAL.attend(*given[:3], CAUSAL, softmax)
    torch.testing.assert_close(scaled, plain, **FP32_SUM_ORDER)


def test_scaling_by_the_layer_keeps_fp16_scores_finite() -> None:
    q = torch.full((1, 1, 2, 8), 100.0, dtype=torch.float16)
    softmax = Softmax(1.0)
    assert not LOCAL.attend(q, q, q, CAUSAL, softmax).isfinite().all()
    scaled = LocalBackend(Numerics(layer_scaling=8))
    assert scaled.attend(q, q, q, CAUSAL, softmax).isfinite().all()


def test_softmax_in_fp32_is_nearer_to_the_truth() -> None:
    q, k, v, _ = inputs(S, dtype=torch.bfloat16)
    given = [x.detach() * 4 for x in (q, k, v)]
    softmax = Softmax(0.25)
    right = LOCAL.attend(*(x.double() for x in given), CAUSAL, softmax)
    wide = LocalBackend(Numerics(softmax_in_fp32=True)).attend(*given, CAUSAL, softmax)
    assert wide.dtype == torch.bfloat16
    assert (wide - right).abs().mean() <= (
        LOCAL.attend(*given, CAUSAL, softmax) - right
    ).abs().mean()


@pytest.mark.slow
@each_backend
def test_dropout_keeps_the_mean(backend: Any) -> None:
    q, k, v, _ = (x.detach() for x in inputs(8))
    torch.manual_seed(0)
    softmax = Softmax(0.25, 0.25)
    mean = sum(backend.attend(q, k, v, CAUSAL, softmax) for _ in range(2000)) / 2000
    right = LOCAL.attend(q, k, v, CAUSAL, Softmax(0.25))
    torch.testing.assert_close(mean, right, rtol=0, atol=0.1)


# --- what runs on CUDA alone, on stand-ins ----------------------------------------------------


def packed_call(
    q_lengths: Tensor, k_lengths: Tensor, causal: bool, left: int | None, right: int | None
) -> Any:
    """Slices and call of each document."""
    call = BlockCall(
        0.25,
        causal,
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
    )
    for i in range(len(q_lengths) - 1):
        rows = slice(int(q_lengths[i]), int(q_lengths[i + 1]))
        if rows.stop > rows.start:
            yield rows, slice(int(k_lengths[i]), int(k_lengths[i + 1])), call


def one(x: Tensor, rows: slice) -> Tensor:
    """(T, n, d) as (1, n, rows, d)."""
    return x[rows].transpose(0, 1).unsqueeze(0)


class PackedKernels:
    """torch.ops.aten as far as varlen.py uses it, document by document in plain torch."""

    def _flash_attention_forward(
        self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *args: Any, **kw: Any
    ) -> Any:
        assert kw["scale"] == 0.25
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for rows, keys, call in self._documents(cu_q, cu_k, args[3], kw):
            made = block_forward("math", one(q, rows), one(k, keys), one(v, keys), call)
            out[rows], lse[:, rows] = made[0][0].transpose(0, 1), made[1][0]
        return out, lse, torch.zeros(2, dtype=torch.uint64), None, None

    def _flash_attention_backward(self, dout: Any, *args: Any, **kw: Any) -> Any:
        q, k, v, out, lse, cu_q, cu_k, *rest = args
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for rows, keys, call in self._documents(cu_q, cu_k, rest[3], kw):
            saved = Saved(
                *(one(q, rows), one(k, keys), one(v, keys), one(out, rows)),
                *(lse[:, rows].unsqueeze(0), torch.zeros(2)),
            )
            made = block_backward("math", one(dout, rows), saved, call)
            for grad, part, place in zip(grads, made, (rows, keys, keys), strict=True):
                grad[place] += part[0].transpose(0, 1)
        return grads

    def _documents(self, cu_q: Any, cu_k: Any, causal: bool, kw: Any) -> Any:
        return packed_call(cu_q, cu_k, causal, kw["window_size_left"], kw["window_size_right"])


@pytest.mark.few_cases(6)
@each_sink
@pytest.mark.parametrize("s", [S, 5])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "matrix"])
def test_torch_flash(monkeypatch: pytest.MonkeyPatch, kind: str, s: int, with_sink: bool) -> None:
    monkeypatch.setattr(varlen, "_ATEN", PackedKernels())
    monkeypatch.setitem(lse_kernels.FORWARD, "flash", lse_kernels.FORWARD["math"])
    monkeypatch.setitem(lse_kernels.BACKWARD, "flash", lse_kernels.BACKWARD["math"])
    backend = SdpaBackend("flash")
    if masks(S)[kind].plain and not with_sink:
        pytest.skip("goes through scaled_dot_product_attention, which has no flash on the CPU")
    compare(backend, inputs(s, S, groups=2), masks(S)[kind], with_sink)


@each_sink
@pytest.mark.parametrize("s", [S, 5])
def test_torch_flash_across(monkeypatch: pytest.MonkeyPatch, s: int, with_sink: bool) -> None:
    monkeypatch.setattr(varlen, "_ATEN", PackedKernels())
    mask = cross_mask(LENGTHS, s, S)
    compare(SdpaBackend("flash"), inputs(s, S, groups=2), mask, with_sink)


def fake_flash(version: int) -> SimpleNamespace:
    """The functions of a flash-attn package, with the names that its version has."""
    allowed = {"softmax_scale", "causal", "window_size"}
    allowed |= {2: {"dropout_p", "deterministic"}, 3: {"deterministic"}, 4: set()}[version]

    def packed(q: Any, k: Any, v: Any, lengths: Any, options: Any) -> Tensor:
        assert set(options) == allowed
        left, right = options["window_size"]
        assert ((left, right) == (None, None)) or version != 4 or left is not None
        parts = []
        for rows, keys, call in packed_call(
            *lengths, options["causal"], left, -1 if right is None else right
        ):
            made = block_forward("math", one(q, rows), one(k, keys), one(v, keys), call)
            parts.append(made[0][0].transpose(0, 1))
        return torch.cat(parts)

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        lengths = [options.pop(f"cu_seqlens_{x}") for x in "qk"]
        assert all(options.pop(f"max_seqlen_{x}") > 0 for x in "qk")
        out = packed(q, k, v, lengths, options)
        return out if version == 2 else (out, None)

    def flash_attn_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        b, s, t = q.shape[0], q.shape[1], k.shape[1]
        lengths = (torch.arange(b + 1) * s, torch.arange(b + 1) * t)
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out = packed(*rows, lengths, options).unflatten(0, (b, s))
        return out if version == 2 else (out, None)

    return SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("s", [S, 5])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "matrix"])
def test_flash_package(monkeypatch: pytest.MonkeyPatch, version: int, kind: str, s: int) -> None:
    names = {2: ["flash_attn"], 3: ["flash_attn_interface"], 4: ["flash_attn", "flash_attn.cute"]}
    for name in names[version]:
        module = ModuleType(name)
        module.__dict__.update(vars(fake_flash(version)))
        monkeypatch.setitem(sys.modules, name, module)
    mask, given = masks(S)[kind], inputs(s, S, groups=2)
    out = FlashBackend(version).attend(
        *given[:3], mask, Softmax(1.0 / math.sqrt(given[0].shape[3]))
    )
    right = expected(given, mask, False)[0]
    torch.testing.assert_close(out, right.float(), **FP32_SUM_ORDER)


class Seen(torch.autograd.Function):
    """Notes how the gradient that comes back is laid out."""

    strides: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        Seen.strides.append(dout.stride())
        return dout


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3)])
def test_a_gradient_comes_back_laid_out_like_the_output(order: tuple[int, ...]) -> None:
    """Whatever follows: torch's plans of cuDNN do not look at the layout of gradients."""
    out = inputs(6)[0].detach().requires_grad_()
    shape = [out.shape[place] for place in order]
    places = [order.index(place) for place in range(4)]
    weights = torch.randn(shape).permute(places)
    given = Seen.apply(out)  # type: ignore[no-untyped-call]
    (even_gradient(given, out) * weights).sum().backward()
    assert out.grad is not None
    assert torch.equal(out.grad, weights)
    assert Seen.strides[-1] == given.stride()


@pytest.mark.slow
@pytest.mark.parametrize(("follows", "copies"), [((2, 0, 1, 3), 0), ((0, 1, 2, 3), 1)])
def test_compiled_gradients_are_copied_if_needed(follows: tuple[int, ...], copies: int) -> None:
    """Heads lie between batch and channels, as attention leaves them in (s, b, n, d)."""
    # A second, which unit tests need not pay.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    torch.compiler.reset()  # what other tests compiled of the same function
    seen: list[str] = []

    def count(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.sin(x).permute(1, 2, 0, 3)
        return even_gradient(out, out).permute(follows).flatten(2) @ weight

    x = torch.randn(5, 2, 3, 4, requires_grad=True)
    weight = torch.randn(math.prod((2, 3, 5, 4)[dim] for dim in follows[2:]), 7)
    run(x, weight).sum().backward()
    assert x.grad is not None
    given, x.grad = x.grad, None
    boxed = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=count)
    torch.compile(run, backend=boxed)(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, given)
    assert sum("clone" in name or "copy" in name for name in seen) == copies, seen
