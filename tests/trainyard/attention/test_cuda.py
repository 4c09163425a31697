"""Kernels of CUDA against attention written out; skipped without a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.attention.cases import (
    KINDS,
    attend,
    attend_biased,
    expected,
    expected_biased,
    inputs,
    masks,
    some_bias,
    to,
)
from trainyard.attention.base import Numerics, Softmax
from trainyard.attention.blockwise import block_attention, causal_blocks
from trainyard.attention.lse_kernels import BlockCall, Saved, block_backward, block_forward
from trainyard.attention.masks import CAUSAL, cross_mask
from trainyard.attention.select import Needs, build_backend, choose_backend, probe_device
from trainyard.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

S, D = 192, 64
BF16 = {"out": 2e-2, "grad": 4e-2}
"""Of the largest value: bf16 has 8 bits, and probabilities are rounded to it."""
REQUESTS = ("auto", "flash", "fused", "unfused", "local")

each_sink = pytest.mark.parametrize("with_sink", [False, True], ids=["vanilla", "sink"])


def assert_near(got: Tensor, right: Tensor, bound: float, what: str) -> None:
    right = right.to(got.device, torch.float32)
    worst = float((got.float() - right).abs().max()) / float(right.abs().max())
    assert worst <= bound, f"{what}: {worst:.4f} of the largest value, at most {bound}"


def backend_for(request: Any, dtype: torch.dtype, kind: str, with_sink: bool) -> Any:
    needs = Needs(
        dtype=str(dtype).removeprefix("torch."),
        head_dim=D,
        window="window" in kind,
        documents="documents" in kind,
        sink=with_sink,
    )
    try:
        choice = choose_backend(request, probe_device("cuda"), needs)
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    return build_backend(choice, Numerics(softmax_in_fp32=True), deterministic=False)


def compare(backend: Any, s: int, groups: int, dtype: torch.dtype, kind: str, sink: bool) -> None:
    given = inputs(s, S, groups=groups, d=D, dtype=dtype, device="cuda")
    out, grads = attend(backend, given, to(masks(S)[kind], "cuda"), sink)
    right, wanted = expected([x.cpu() for x in given], masks(S)[kind], sink)
    bounds = BF16 if dtype == torch.bfloat16 else {"out": 1e-4, "grad": 1e-4}
    assert_near(out, right, bounds["out"], "out")
    for name, grad, x in zip(("q", "k", "v", "sink"), grads, wanted, strict=False):
        assert_near(grad, x, bounds["grad"], name)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [4, 2])
@each_sink
def test_bf16_kernels(request_: str, kind: str, groups: int, with_sink: bool) -> None:
    backend = backend_for(request_, torch.bfloat16, kind, with_sink)
    compare(backend, S, groups, torch.bfloat16, kind, with_sink)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "matrix"])
@each_sink
def test_queries_are_the_last_of_the_keys(request_: str, kind: str, with_sink: bool) -> None:
    backend = backend_for(request_, torch.bfloat16, kind, with_sink)
    compare(backend, 64, 2, torch.bfloat16, kind, with_sink)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("s", [S, 64])
@each_sink
def test_queries_of_another_sequence_see_no_padding(request_: str, s: int, with_sink: bool) -> None:
    """Two rows, with 100 keys and with all; a document of keys without queries has no gradient."""
    backend = backend_for(request_, torch.bfloat16, "documents", with_sink)
    given = inputs(s, S, groups=2, d=D, dtype=torch.bfloat16, device="cuda")
    mask = cross_mask(torch.tensor([100, S]), s, S)
    out, grads = attend(backend, given, to(mask, "cuda"), with_sink)
    right, wanted = expected([x.cpu() for x in given], mask, with_sink)
    assert_near(out, right, BF16["out"], "out")
    assert not grads[1][0, :, 100:].any()
    assert not grads[2][0, :, 100:].any()
    for name, grad, x in zip(("q", "k", "v", "sink"), grads, wanted, strict=False):
        assert_near(grad, x, BF16["grad"], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["causal", "full", "documents"])
@pytest.mark.parametrize("s", [S, 100])
def test_a_bias_is_added_to_scores(dtype: torch.dtype, kind: str, s: int) -> None:
    needs = Needs(dtype=str(dtype).removeprefix("torch."), head_dim=D, bias=True)
    choice = choose_backend("auto", probe_device("cuda"), needs)
    assert choice.kernel == "efficient"
    backend = build_backend(choice, Numerics(), deterministic=False)
    given = [x * 0.3 for x in inputs(s, d=D, dtype=dtype, device="cuda")[:3]]
    bias, mask = some_bias(s, s), masks(s)[kind]
    own = bias.detach().cuda().requires_grad_()
    found = attend_biased(backend, given, to(mask, "cuda"), own)
    right = expected_biased([x.cpu() for x in given], mask, bias)
    bound = BF16 if dtype == torch.bfloat16 else {"out": 1e-4, "grad": 1e-4}
    for name, got, wanted in zip(("out", "q", "k", "v", "bias"), found, right, strict=True):
        assert_near(got, wanted, bound["out" if name == "out" else "grad"], name)


@pytest.mark.parametrize("kind", KINDS)
@each_sink
def test_fp32_kernels(kind: str, with_sink: bool) -> None:
    compare(
        backend_for("auto", torch.float32, kind, with_sink), S, 2, torch.float32, kind, with_sink
    )


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "math"])
@pytest.mark.parametrize("groups", [4, 2])
@each_sink
def test_blocks_make_up_attention(kernel: str, groups: int, with_sink: bool) -> None:
    class Pieces:
        def attend(self, q: Any, k: Any, v: Any, mask: Any, softmax: Softmax) -> Tensor:
            blocks = causal_blocks(0, 64, 0) + causal_blocks(64, S, 64)
            return block_attention(q, k, v, blocks, kernel, softmax)

    compare(Pieces(), S, groups, torch.bfloat16, "causal", with_sink)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_layout_seen_before_is_not_taken_for_another(kernel: str, groups: int) -> None:
    """The same queries and keys, their output and its gradient laid out in two ways."""
    q, k, v, _ = inputs(S, groups=groups, d=D, dtype=torch.bfloat16, device="cuda")
    dout = torch.randn(q.shape, device="cuda").to(q.dtype)
    call = BlockCall(0.125, causal=True)
    with torch.no_grad():
        out, lse, rng = block_forward(kernel, q, k, v, call)
        found = [
            block_backward(kernel, dout_, Saved(q, k, v, out_, lse, rng), call)
            for out_ in (out, out.contiguous(), out.transpose(0, 1).contiguous().transpose(0, 1))
            for dout_ in (dout, torch.empty_like(q).copy_(dout))
        ]
    for other in found[1:]:
        for got, right, name in zip(other, found[0], "qkv", strict=True):
            assert_near(got, right, 1e-2, name)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "math"])
def test_dropout_of_blocks_is_the_same_backward(kernel: str) -> None:
    """v gets what the kept weights give: with v = 1 and dout = 1, sum(dv) = sum(out)."""
    q, k, _, _ = inputs(S, d=D, dtype=torch.bfloat16, device="cuda")
    v = torch.ones_like(k).requires_grad_()
    blocks = causal_blocks(0, 64, 0) + causal_blocks(64, S, 64)
    out = block_attention(q, k, v, blocks, kernel, Softmax(0.125, 0.3))
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert out.float().std() > 0.01
    assert float(dv.float().sum()) == pytest.approx(float(out.float().sum()), rel=1e-2)


@pytest.mark.parametrize("kind", ["causal", "window", "documents and window"])
@each_sink
def test_a_compiler_takes_backends_whole(kind: str, with_sink: bool) -> None:
    backend = backend_for("auto", torch.bfloat16, kind, with_sink)
    given = inputs(S, groups=2, d=D, dtype=torch.bfloat16, device="cuda")
    mask = to(masks(S)[kind], "cuda")

    def doubled(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        softmax = Softmax(0.125)
        return 2 * backend.attend(q, k, v, mask, softmax._replace(sink=sink if with_sink else None))

    torch._dynamo.reset()
    compiled = torch.compile(doubled, fullgraph=True)
    out, right = compiled(*given), doubled(*given)
    assert_near(out, right, 1e-2, "out")
    used = given if with_sink else given[:3]
    for got, wanted in zip(
        torch.autograd.grad(out.sum(), used), torch.autograd.grad(right.sum(), used), strict=True
    ):
        assert_near(got, wanted, 2e-2, "grad")


def test_deterministic_mode_repeats_every_bit() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        needs = Needs(dtype="bfloat16", head_dim=D, deterministic=True)
        choice = choose_backend("auto", probe_device("cuda"), needs)
        backend = build_backend(choice, Numerics(), deterministic=True)
        given = inputs(S, groups=2, d=D, dtype=torch.bfloat16, device="cuda")
        runs = [attend(backend, given, CAUSAL, False) for _ in range(5)]
        for out, grads in runs[1:]:
            assert torch.equal(out, runs[0][0])
            assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1], strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
