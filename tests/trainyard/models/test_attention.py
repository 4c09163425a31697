"""Self-attention as a layer: names, caches, compilation, ranks that share heads and sequence."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainyard.models.small_gpt import model_parallel
from trainyard.attention.masks import CAUSAL, AttentionMask, as_mask
from trainyard.errors import ConfigError
from trainyard.inference.kv_cache import StaticKVCache
from trainyard.models.attention import SelfAttention
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.rope import build_rotary
from trainyard.parallel.context.split import cut_sequence, local_positions
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import shard_of
from trainyard.testing.pool import RankPool

S, B = 16, 2
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "seq_length": S,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwen": {"qk_layernorm": True, "add_qkv_bias": True, "disable_bias_linear": True},
    "llama 4": {"qk_layernorm": True, "qk_l2_norm": True, "rotary_interleaved": True},
    "sink": {"softmax_type": "learnable"},
    "off-by-one": {"softmax_type": "off-by-one", "window_size": "5,0"},
    "window": {"window_size": "5,0", "window_attn_skip_freq": "2"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def assert_agree(got: Tensor, right: Tensor, name: str = "") -> None:
    """fp32 sums in another order: 1e-5 of the largest value."""
    bound = 1e-5 * float(right.detach().abs().max())
    assert got.shape == right.shape
    assert float((got - right).detach().abs().max()) <= bound, name


def config(**changes: Any) -> GPTConfig:
    return GPTConfig(**(SMALL | changes))


def build(settings: GPTConfig, parallel: ModelParallel = ALONE) -> SelfAttention:
    module = SelfAttention(settings, 0, parallel)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shard = shard_of(parameter)
            shape = tuple(parameter.shape) if shard is None else shard.shape
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
            parameter.copy_(whole if shard is None else shard.take(whole))
    return module


def some_input() -> Tensor:
    return torch.randn(S, B, 32, generator=torch.Generator().manual_seed(0))


def rotary_of(settings: GPTConfig, places: Tensor) -> Any:
    return build_rotary(settings, places.unsqueeze(0), torch.float32)


def test_parameters_have_megatron_core_names() -> None:
    settings = config(qk_layernorm=True, softmax_type="learnable")
    shapes = {name: tuple(p.shape) for name, p in build(settings).named_parameters()}
    assert shapes == {
        "linear_qkv.weight": (64, 32),
        "linear_qkv.bias": (64,),
        "q_layernorm.weight": (4,),
        "k_layernorm.weight": (4,),
        "core_attention.softmax_offset": (8,),
        "linear_proj.weight": (32, 32),
        "linear_proj.bias": (32,),
    }
    assert not list(build(config(softmax_type="off-by-one")).core_attention.parameters())


def test_heads_are_divided_by_the_root_of_their_mean_square() -> None:
    """Of forward and backward pass; --qk-l2-norm replaces --qk-layernorm and its weights."""
    settings = config(qk_l2_norm=True, qk_layernorm=True, norm_epsilon=0.1)
    module, plain = build(settings), build(config())
    plain.load_state_dict(module.state_dict())

    def by_hand(heads: Tensor) -> Tensor:
        return heads / torch.sqrt(heads.square().mean(-1, keepdim=True) + 0.1)

    def split_heads(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = SelfAttention._split_heads(plain, qkv, bias)
        return by_hand(q), by_hand(k), v

    rotary, results = rotary_of(settings, torch.arange(S)), []
    with mock.patch.object(plain, "_split_heads", split_heads):
        for layer in (module, plain):
            x = some_input().requires_grad_()
            out = layer(x, rotary)
            wanted = [x, *layer.parameters()]
            results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for found, right in zip(*results, strict=True):
        assert_agree(found, right)
    assert not torch.allclose(plain(some_input(), rotary), results[0][0])


@pytest.mark.slow
@each_kind
def test_a_layer_compiles_without_a_break(kind: str) -> None:
    settings = config(**KINDS[kind])
    module, x = build(settings), some_input().requires_grad_()
    rotary = rotary_of(settings, torch.arange(S))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    bounds = torch.tensor([[0, 5, 16], [0, 16, 16]], dtype=torch.int32)
    for mask in (CAUSAL, AttentionMask(bounds=bounds)):
        out, right = compiled(x, rotary, mask), module(x, rotary, mask)
        assert_agree(out, right)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert_agree(grad, torch.autograd.grad(right.sum(), x)[0])


@each_kind
@torch.inference_mode()
def test_tokens_through_a_cache_equal_the_whole(kind: str) -> None:
    settings = config(**KINDS[kind])
    module, x = build(settings).eval(), some_input()
    whole = module(x, rotary_of(settings, torch.arange(S)))
    cache = StaticKVCache(settings, B, S)
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 12), (12, 16)):
        num_new = end - begin
        rotary = build_rotary(settings, cache.positions(num_new), torch.float32)
        cache.begin([num_new] * B)
        parts.append(module(x[begin:end], rotary, as_mask(cache.mask(num_new)), cache))
        cache.advance()
    assert_agree(torch.cat(parts), whole)


@each_kind
@torch.inference_mode()
def test_ragged_rows_of_a_cache_equal_rows_alone(kind: str) -> None:
    settings = config(**KINDS[kind])
    module, x = build(settings).eval(), some_input()
    cache, lengths = StaticKVCache(settings, B, S), [9, 4]
    cache.begin(lengths)
    module(x[:9], rotary_of(settings, torch.arange(9)), as_mask(cache.mask(9)), cache)
    cache.advance()
    rotary = build_rotary(settings, cache.positions(3), torch.float32)
    following = torch.stack([x[n : n + 3, row] for row, n in enumerate(lengths)], dim=1)
    out = module(following, rotary, as_mask(cache.mask(3)), cache)
    for row, length in enumerate(lengths):
        places = torch.arange(length + 3)
        alone = module(x[: length + 3, row : row + 1], rotary_of(settings, places))
        assert_agree(out[:, row], alone[length:, 0])


@each_kind
def test_recomputing_the_core_changes_no_bit(kind: str) -> None:
    changes = KINDS[kind] | {"attention_dropout": 0.2}
    results = []
    for again in (False, True):
        module = build(config(**changes, recompute_activations=again)).train()
        x = some_input().requires_grad_()
        torch.manual_seed(4)
        module(x, rotary_of(config(), torch.arange(S))).sum().backward()
        results.append([x.grad, *(p.grad for p in module.parameters())])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    class Three(ModelParallel):
        tp_size = 3  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"--num-query-groups \(4\) must be divisible by .*\(3\)"):
        SelfAttention(config(), 0, Three())


# --- on several ranks -------------------------------------------------------------------------


def check_ranks(kind: str, tp: int, cp: int, comm_type: Any, sequence_parallel: bool) -> None:
    settings = config(**KINDS[kind])
    serial, x = build(settings), some_input().requires_grad_()
    right = serial(x, rotary_of(settings, torch.arange(S)))
    weights = torch.randn(right.shape, generator=torch.Generator().manual_seed(8))
    right.backward(weights)

    parallel = model_parallel(tp, cp, sequence_parallel, comm_type)
    module = build(settings, parallel)

    def own(whole: Tensor) -> Tensor:
        part = cut_sequence(whole.detach(), 0, parallel.cp_size, parallel.cp_rank)
        return part.chunk(tp)[parallel.tp_rank] if sequence_parallel else part

    local = own(x).clone().requires_grad_()
    places = local_positions(S, parallel.cp_size, parallel.cp_rank)
    out = module(local, rotary_of(settings, places))
    assert_agree(out, own(right))
    out.backward(own(weights))
    assert local.grad is not None
    assert x.grad is not None
    assert_agree(local.grad, own(x.grad))
    wanted = dict(serial.named_parameters())
    for name, parameter in module.named_parameters():
        grad, shard = parameter.grad, shard_of(parameter)
        assert grad is not None
        whole_grad = wanted[name].grad
        assert whole_grad is not None
        if parallel.cp is not None:
            dist.all_reduce(grad, group=parallel.cp)
        summand = "layernorm" in name or (sequence_parallel and name == "linear_proj.bias")
        if parallel.tp is not None and summand:
            dist.all_reduce(grad, group=parallel.tp)
        expected = whole_grad if shard is None else shard.take(whole_grad)
        assert_agree(grad, expected, name)


LAYOUTS = [
    ("plain", 2, 1, "p2p", False),
    ("qwen", 2, 1, "p2p", True),
    ("llama 4", 2, 1, "p2p", True),
    ("sink", 2, 2, "p2p", True),
    ("qwen", 2, 2, "allgather", False),
    ("window", 1, 2, "allgather", False),
    ("off-by-one", 2, 2, "a2a", True),
    ("sink", 1, 4, "a2a", False),
    ("qwen", 1, 4, "p2p", False),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_share_heads_and_sequence_agree_with_one(
    ranks: RankPool, layout: tuple[str, int, int, str, bool]
) -> None:
    ranks.run(check_ranks, layout[1] * layout[2], *layout)
