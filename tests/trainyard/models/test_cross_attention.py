"""Attention to another sequence: against torch's, and on ranks that share heads and sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.trainyard.models.small_gpt import model_parallel
from tests.trainyard.models.test_attention import assert_agree
from trainyard.attention.masks import cross_mask
from trainyard.errors import ConfigError
from trainyard.models.cross_attention import CrossAttention
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.init import weight_std
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import has_partial_grad, shard_of
from trainyard.testing.pool import RankPool

S, T, B, H, SOURCE, D = 8, 12, 2, 32, 24, 6
LENGTHS = torch.tensor([5, T])
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": H,
    "num_attention_heads": 8,
    "kv_channels": D,
    "seq_length": S,
    "attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no biases": {"disable_bias_linear": True},
    "grouped": {"group_query_attention": True, "num_query_groups": 4, "window_size": "3,0"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, parallel: ModelParallel = ALONE, **changes: Any) -> CrossAttention:
    module = CrossAttention(GPTConfig(**(SMALL | KINDS[kind] | changes)), 0, parallel, SOURCE)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shard = shard_of(parameter)
            shape = tuple(parameter.shape) if shard is None else shard.shape
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
            parameter.copy_(whole if shard is None else shard.take(whole))
    return module


def some_inputs() -> tuple[Tensor, Tensor]:
    """Queries (s, b, h) and source (t, b, source)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((S, B, H), (T, B, SOURCE))
    x, source = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return x, source


def reference(module: CrossAttention, x: Tensor, source: Tensor) -> Tensor:
    """In torch's functions, one row of the batch after another, without its padding."""
    rows = []
    for row, length in enumerate(LENGTHS.tolist()):
        queries, keys = x[:, row], source[:length, row]
        q = functional.linear(queries, module.linear_q.weight, module.linear_q.bias)
        kv = functional.linear(keys, module.linear_kv.weight, module.linear_kv.bias)
        pairs = kv.view(length, -1, 2, D).repeat_interleave(module.heads // module.groups, dim=1)
        context = functional.scaled_dot_product_attention(
            q.view(S, -1, D).transpose(0, 1), *pairs.permute(2, 1, 0, 3)
        )
        flat = context.transpose(0, 1).flatten(1)
        rows.append(functional.linear(flat, module.linear_proj.weight, module.linear_proj.bias))
    return torch.stack(rows, dim=1)


@each_kind
def test_outputs_and_gradients_equal_torchs(kind: str) -> None:
    module, given = build(kind).double(), [x.double() for x in some_inputs()]
    used = [*given, *module.parameters()]
    weights = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).double()
    out, right = module(*given, cross_mask(LENGTHS, S, T)), reference(module, *given)
    torch.testing.assert_close(out, right)
    found, wanted = (torch.autograd.grad(y, used, weights) for y in (out, right))
    torch.testing.assert_close(found, wanted)


def test_parameters_have_megatron_core_names() -> None:
    shapes = {name: tuple(p.shape) for name, p in build("plain").named_parameters()}
    assert shapes == {
        "linear_q.weight": (8 * D, H),
        "linear_q.bias": (8 * D,),
        "linear_kv.weight": (2 * 8 * D, SOURCE),
        "linear_kv.bias": (2 * 8 * D,),
        "linear_proj.weight": (H, 8 * D),
        "linear_proj.bias": (H,),
    }


def test_the_projection_starts_as_small_as_that_of_self_attention() -> None:
    config = GPTConfig(**SMALL)
    assert weight_std("decoder.layers.0.cross_attention.linear_proj.weight", config) == weight_std(
        "decoder.layers.0.self_attention.linear_proj.weight", config
    )
    assert weight_std("decoder.layers.0.cross_attention.linear_kv.weight", config) == 0.02


def test_recomputing_the_core_changes_no_bit() -> None:
    results = []
    for again in (False, True):
        module = build("plain", attention_dropout=0.2, recompute_activations=again).train()
        given = some_inputs()
        torch.manual_seed(4)
        module(*given, cross_mask(LENGTHS, S, T)).sum().backward()
        results.append([x.grad for x in (*given, *module.parameters())])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


def test_ranks_cannot_share_the_sequences() -> None:
    class Two(ModelParallel):
        cp_size = 2  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="--context-parallel-size 2: cross-attention"):
        CrossAttention(GPTConfig(**SMALL), 0, Two())


def check_ranks(kind: str, tp: int, sequence_parallel: bool) -> None:
    serial, given = build(kind), some_inputs()
    mask = cross_mask(LENGTHS, S, T)
    right = serial(*given, mask)
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(8))
    right.backward(weights)
    parallel = model_parallel(tp, 1, sequence_parallel, "p2p")
    module = build(kind, parallel)

    def own(whole: Tensor) -> Tensor:
        return whole.detach().chunk(tp)[parallel.tp_rank] if sequence_parallel else whole.detach()

    local = [own(x).clone().requires_grad_() for x in given]
    out = module(*local, mask)
    assert_agree(out, own(right))
    out.backward(own(weights))
    for mine, whole in zip(local, given, strict=True):
        assert whole.grad is not None
        assert mine.grad is not None
        assert_agree(mine.grad, own(whole.grad))
    wanted = dict(serial.named_parameters())
    for name, parameter in module.named_parameters():
        grad, shard = parameter.grad, shard_of(parameter)
        whole_grad = wanted[name].grad
        assert grad is not None
        assert whole_grad is not None
        if has_partial_grad(parameter):
            dist.all_reduce(grad, group=parallel.tp)
        expected = whole_grad if shard is None else shard.take(whole_grad)
        assert_agree(grad, expected, name)


@pytest.mark.few_cases(1)
@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2 sp"])
@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_two_ranks_agree_with_one(ranks: RankPool, kind: str, sequence_parallel: bool) -> None:
    ranks.run(check_ranks, 2, kind, 2, sequence_parallel)
