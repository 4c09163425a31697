"""Attention over sequences on several ranks against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainyard.attention.cases import LOCAL, attend, inputs, masks
from trainyard.attention.base import Softmax
from trainyard.attention.masks import CAUSAL, AttentionMask
from trainyard.attention.sdpa import SdpaBackend
from trainyard.errors import ConfigError
from trainyard.models.context_attention import ContextAttention, check_context
from trainyard.parallel.context.split import cut_sequence, join_sequence
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER

S = 32
PLAIN = ["causal", "full"]
RULES = [*PLAIN, "window", "documents", "documents and window"]
KINDS = {"p2p": PLAIN, "allgather": RULES, "a2a": RULES}

each_way = pytest.mark.parametrize("comm_type", KINDS)


def over_all_ranks(comm_type: Any, kernel: str = "cpu") -> ContextAttention:
    group = dist.group.WORLD
    assert group is not None
    return ContextAttention(group, comm_type, SdpaBackend(kernel), kernel)


def cut(x: Tensor) -> Tensor:
    part = cut_sequence(x.detach(), 2, dist.get_world_size(), dist.get_rank())
    return part.requires_grad_()


def whole(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(8)]
    parts = parts[: dist.get_world_size()]
    dist.all_gather(parts, part.contiguous())
    return join_sequence(parts, 2)


def compare(backend: ContextAttention, mask: AttentionMask, groups: int, with_sink: bool) -> None:
    given = inputs(S, groups=groups)
    right, wanted = attend(LOCAL, given, mask, with_sink)
    local = [*(cut(x) for x in given[:3]), given[3]]
    out = backend.attend(*local[:3], mask, Softmax(0.25, sink=given[3] if with_sink else None))
    torch.testing.assert_close(whole(out), right, **FP32_SUM_ORDER)
    weights = cut(torch.randn(right.shape, generator=torch.Generator().manual_seed(1)))
    grads = torch.autograd.grad(out, local if with_sink else local[:3], weights)
    for grad, x in zip(grads[:3], wanted[:3], strict=True):
        torch.testing.assert_close(whole(grad), x, **FP32_SUM_ORDER)
    if with_sink:
        total = grads[3].clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, wanted[3], **FP32_SUM_ORDER)


def check_all(comm_type: str, kernel: str) -> None:
    for kind in KINDS[comm_type]:
        for groups in (4, 2, 1):
            for with_sink in (False, True):
                compare(over_all_ranks(comm_type, kernel), masks(S)[kind], groups, with_sink)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kernel", ["cpu", "math"])
@each_way
def test_ranks_agree_with_one_process(
    ranks: RankPool, comm_type: str, kernel: str, world_size: int
) -> None:
    ranks.run(check_all, world_size, comm_type, kernel)


def check_causality(comm_type: str) -> None:
    q, k, v, _ = (x.detach() for x in inputs(S))
    changed, at = [x.clone() for x in (q, k, v)], 13
    for x in changed:
        x[:, :, at:] += 1.0
    softmax = Softmax(0.25)
    before, after = (
        whole(over_all_ranks(comm_type).attend(*(cut(x) for x in given), CAUSAL, softmax))
        for given in ((q, k, v), changed)
    )
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    assert ((before - after).abs().amax(dim=(0, 1, 3))[at:] > 0).all()


def check_compiled(comm_type: str) -> None:
    backend = over_all_ranks(comm_type)
    given = [cut(x) for x in inputs(S, groups=2)[:3]]

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * backend.attend(q, k, v, CAUSAL, Softmax(0.25))

    torch._dynamo.reset()
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    out, right = compiled(*given), doubled(*given)
    torch.testing.assert_close(out, right)
    for got, wanted in zip(
        torch.autograd.grad(out.sum(), given), torch.autograd.grad(right.sum(), given), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def check_dropout(comm_type: str) -> None:
    q, k, v, _ = (x.detach() for x in inputs(S))
    local = [cut(x).detach() for x in (q, k, v)]
    torch.manual_seed(dist.get_rank())
    mean = torch.zeros_like(local[0])
    for _ in range(300):
        out = over_all_ranks(comm_type).attend(*local, CAUSAL, Softmax(0.25, 0.2))
        mean += out / 300
    right = LOCAL.attend(q, k, v, CAUSAL, Softmax(0.25))
    assert (mean - cut(right)).abs().mean() < 0.05
    assert not torch.equal(out, cut(right))


def check_bf16(comm_type: str) -> None:
    given = [x.detach() for x in inputs(S, groups=2)]
    halves = [x.bfloat16() for x in given[:3]]
    wide = [x.double().requires_grad_() for x in [*halves, given[3]]]
    right, _ = attend(LOCAL, wide, CAUSAL, False)
    local = [cut(x) for x in halves]
    out = over_all_ranks(comm_type).attend(*local, CAUSAL, Softmax(0.25))
    out.float().sum().backward()
    assert out.dtype == local[1].grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    torch.testing.assert_close(whole(out).double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("check", "world_size"),
    [(check_causality, 4), (check_compiled, 2), (check_dropout, 2), (check_bf16, 2)],
    ids=["causality", "compiled", "dropout", "bf16"],
)
@each_way
def test_each_exchange_is_causal_compiles_and_keeps_mean_and_dtype(
    ranks: RankPool, check: Callable[[str], None], world_size: int, comm_type: str
) -> None:
    ranks.run(check, world_size, comm_type)


def check_refusal(kind: str) -> None:
    q, k, v = (cut(x) for x in inputs(S)[:3])
    over_all_ranks("p2p").attend(q, k, v, masks(S)[kind], Softmax(0.25))


@pytest.mark.distributed
def test_the_ring_refuses_documents_with_advice(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match=r"p2p.*packed documents.*use --cp-comm-type allgather"):
        ranks.run(check_refusal, 2, "documents")


def test_what_a_way_cannot_do_is_refused_before_anything_is_built() -> None:
    check_context("p2p", 1, 3, (1, 0))
    check_context("a2a", 4, 8, (1, 0))
    check_context("allgather", 4, 3, (1, 0))
    with pytest.raises(ConfigError, match=r"p2p.*--window-size.*allgather or a2a"):
        check_context("p2p", 2, 4, (8, 0))
    with pytest.raises(ConfigError, match=r"a2a.*the 6 of a rank.*divisible by .*\(4\)"):
        check_context("a2a", 4, 6, None)
