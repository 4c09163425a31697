"""Laws of a mixture of experts in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.trainyard.models.small_gpt import LLAMA, SMALL
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.moe import balance, report, routing
from trainyard.models.moe.dispatch import through_experts
from trainyard.models.moe.layer import MixtureOfExperts
from trainyard.models.moe.router import Router
from trainyard.models.moe.rows import rows_of
from trainyard.models.moe_config import MoEConfig
from trainyard.parallel.model import ALONE, ExpertParallel
from trainyard.testing.tolerances import FP32_SUM_ORDER

E, K, T, H = 4, 2, 24, 32
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.2}
LLAMA4: dict[str, Any] = {
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
}


def config(**moe: Any) -> GPTConfig:
    return GPTConfig(**SMALL | LLAMA | NO_DROPOUT, moe=MoEConfig(**{"num_experts": E} | moe))


def mixture(seed: int = 3, **moe: Any) -> MixtureOfExperts:
    model = GPTModel(config(**moe), 64)
    init_parameters(model, seed)
    layer = model.decoder.layers["0"]
    found = layer.mlp
    assert isinstance(found, MixtureOfExperts)
    return found


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(T // 2, 2, H, generator=torch.Generator().manual_seed(seed))


def random_routing(seed: int = 2, k: int = K) -> routing.Routing:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(seed))
    return routing.choose(logits, MoEConfig(num_experts=E, moe_router_topk=k))


def one_by_one(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every token through its experts, in a loop over tokens."""
    flat = x.flatten(0, 1)
    chosen, _ = layer.router(flat, x.shape[1])
    w1, w2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    out = torch.zeros_like(flat)
    for token in range(len(flat)):
        for weight, expert in zip(chosen.weights[token], chosen.experts[token], strict=True):
            gate, up = (w1[expert] @ flat[token]).chunk(2)
            out[token] += weight * (w2[expert] @ (functional.silu(gate) * up))
    return out.view_as(x)


def test_every_token_gets_the_weighted_sum_of_its_experts() -> None:
    layer, x = mixture(), tokens()
    torch.testing.assert_close(layer(x), one_by_one(layer, x), **FP32_SUM_ORDER)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=["dropless", "capacity", "padded"],
)
def test_weights_on_the_input_change_what_the_experts_see(more: dict[str, Any]) -> None:
    """Forward and backward; no other weight follows, and the shared expert sees the plain token."""
    layer = mixture(**LLAMA4, **more, moe_shared_expert_intermediate_size=16)
    assert layer.shared_experts is not None
    x = tokens().requires_grad_()
    chosen, kept = layer.router(x.flatten(0, 1), x.shape[1])
    scaled = x.flatten(0, 1) * chosen.weights
    w1, w2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    gate, up = torch.einsum("tfh,th->tf", w1[chosen.experts[:, 0]], scaled).chunk(2, -1)
    of_experts = torch.einsum("thf,tf->th", w2[chosen.experts[:, 0]], functional.silu(gate) * up)
    if kept is not None:
        assert not kept.all()
        of_experts = of_experts * kept
    right, found = of_experts.view_as(x) + layer.shared_experts(x), layer(x)
    torch.testing.assert_close(found, right, **FP32_SUM_ORDER)
    wanted = [x, *layer.parameters()]
    grads = [torch.autograd.grad(out.square().sum(), wanted) for out in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **FP32_SUM_ORDER)


def test_weights_before_and_after_linear_experts_are_the_same() -> None:
    before = mixture(**LLAMA4)
    after = mixture(**LLAMA4 | {"moe_apply_probs_on_input": False})
    assert not torch.allclose(before(tokens()), after(tokens()))  # theirs are not linear
    results = []
    for layer in (before, after):
        x = tokens().requires_grad_()
        with mock.patch.object(layer.experts, "forward", lambda rows, counts: rows):
            out = layer(x)
        wanted = [x, layer.router.weight]
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **FP32_SUM_ORDER)


@pytest.mark.parametrize("k", [2, 4])
def test_dispatch_then_combine_is_the_identity_when_every_expert_is(k: int) -> None:
    x = tokens().flatten(0, 1).requires_grad_()
    out = through_experts(
        x, random_routing(k=k), None, lambda rows, counts: rows, E, ExpertParallel(), gather=False
    )
    torch.testing.assert_close(out, x)  # weights of the chosen experts sum to 1
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.ones_like(x))


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_under_capacity_every_choice_is_a_row_or_dropped(policy: Any, pad: bool) -> None:
    moe = MoEConfig(num_experts=E, moe_expert_capacity_factor=0.75, moe_token_drop_policy=policy)
    chosen, limit = random_routing(), routing.capacity(T, moe)
    assert limit == 9
    kept = routing.within_capacity(chosen, limit, moe)
    wanted = routing.counts(chosen.experts, E)
    rows = rows_of(chosen.experts, E, kept, limit if pad else None)
    found = rows.counts if not pad else rows.filled.view(E, limit).sum(1)  # type: ignore[union-attr]
    assert torch.equal(found, wanted.clamp(max=limit))
    assert int(kept.sum()) == int(found.sum()) < T * K
    x = torch.randn(T, H)
    back = rows.collect(rows.spread(x))
    assert torch.equal(back, x.unsqueeze(1) * kept.unsqueeze(-1))
    for expert in range(E):
        here = chosen.experts == expert
        weights, places = chosen.weights[here], here.nonzero()[:, 0]
        if policy == "probs" and (here & ~kept).any():
            assert weights[kept[here]].min() >= weights[~kept[here]].max()
        if policy == "position" and (here & ~kept).any():
            assert places[kept[here]].max() <= places[~kept[here]].min()


def test_kept_and_dropped_choices_of_every_expert_are_its_routed_ones() -> None:
    """Four tokens of two choices, so a capacity of 0.5 is one row an expert."""
    moe = MoEConfig(num_experts=E, moe_expert_capacity_factor=0.5)
    logits = torch.tensor([[9.0, 8, 0, 0], [9, 8, 0, 0], [9, 0, 8, 0], [9, 8, 0, 0]])
    router = Router(config(moe_expert_capacity_factor=0.5), 0, ALONE)
    with torch.no_grad():
        router.weight.zero_()[:, :E] = torch.eye(E)
    x = functional.pad(logits, (0, H - E))
    for _ in range(2):  # micro-batches
        _, kept = router.train()(x, 1)
    sums = router.sums.tolist()
    assert sums == [8.0, 6, 2, 0, 0, 0, 6, 4, 0, 0]
    assert kept is not None
    assert sum(sums[:E]) == 2 * kept.sum() + sum(sums[-E:])
    found = report.layer_sums(config(moe_expert_capacity_factor=0.5))
    assert found is not None
    assert found.width == len(sums)
    of_step = found.report({0: sums}, 2)
    assert of_step.loads == {0: (0.5, 0.375, 0.125, 0.0)}
    assert of_step.drops == {0: (0.75, 4 / 6, 0.0, 0.0)}
    assert of_step.figures == {
        "max expert load": 2.0,
        "min expert load": 0.0,
        "busiest layer": 0,
        "busiest expert": 0,
        "dropped tokens": pytest.approx(10 / 16),
        "busiest expert drops": 0.75,
    }
    dropless = report.layer_sums(config())
    assert dropless is not None
    assert dropless.width == E + report.NUM_FIGURES
    assert not dropless.report({0: sums[:-E]}, 2).drops
    assert report.expert_drops(moe, {0: [0.0] * len(sums)}) == {0: (0.0,) * E}


@pytest.mark.parametrize("pad", [False, True])
def test_more_capacity_than_tokens_is_dropless(pad: bool) -> None:
    dropless = mixture()
    capped = mixture(moe_expert_capacity_factor=float(E), moe_pad_expert_input_to_capacity=pad)
    x = tokens().requires_grad_()
    torch.testing.assert_close(capped(x), dropless(x), **FP32_SUM_ORDER)
    grads = [
        torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (dropless, capped)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **FP32_SUM_ORDER)


def test_permuting_experts_permutes_nothing_else() -> None:
    layer, x, order = mixture(), tokens(), torch.tensor([2, 0, 3, 1])
    before = layer(x)
    with torch.no_grad():
        for parameter in (
            layer.router.weight,
            layer.experts.linear_fc1.weight,
            layer.experts.linear_fc2.weight,
        ):
            parameter.copy_(parameter[order].clone())
    counted = layer.router.sums.clone()
    layer.router.sums.zero_()
    torch.testing.assert_close(layer(x), before, **FP32_SUM_ORDER)
    assert torch.equal(layer.router.sums[:E], counted[:E][order])


def test_padded_rows_and_dropped_choices_have_no_gradient() -> None:
    layer = mixture(moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True)
    x = tokens().requires_grad_()
    layer(x).sum().backward()
    plain = mixture(moe_expert_capacity_factor=0.5)
    y = tokens().requires_grad_()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **FP32_SUM_ORDER)


# --- scores -----------------------------------------------------------------------------------


def test_softmax_before_the_choice_leaves_less_than_one() -> None:
    logits = torch.randn(T, E)
    after = routing.choose(logits, MoEConfig(num_experts=E))
    before = routing.choose(logits, MoEConfig(num_experts=E, moe_router_pre_softmax=True))
    assert torch.equal(after.experts, before.experts)
    assert (before.weights.sum(1) < 1).all()
    renormalised = before.weights / before.weights.sum(1, keepdim=True)
    torch.testing.assert_close(after.weights, renormalised)


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    moe = MoEConfig(
        num_experts=E, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    )
    logits = torch.randn(T, E)
    chosen = routing.choose(logits, moe, torch.tensor([9.0, 0.0, 9.0, 0.0]))
    assert chosen.experts.sort(1).values.eq(torch.tensor([0, 2])).all()
    scores = torch.sigmoid(logits)[:, [0, 2]]
    expected = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(chosen.weights.sort(1).values, expected.sort(1).values)


def test_a_token_visits_the_best_groups_only() -> None:
    moe = MoEConfig(num_experts=8, moe_router_num_groups=4, moe_router_group_topk=1)
    logits = torch.randn(T, 8)
    chosen = routing.choose(logits, moe).experts
    best = logits.view(T, 4, 2).sum(-1).argmax(1)
    assert torch.equal(chosen.sort(1).values, best.unsqueeze(1) * 2 + torch.arange(2))


def test_the_bias_moves_towards_idle_experts() -> None:
    c = config(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.5,
    )
    router = Router(c, 0, ALONE)
    router.finish_step([10.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    assert router.expert_bias is not None
    assert router.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.5]


# --- losses -----------------------------------------------------------------------------------


def switch_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """e sum f P, from its definition."""
    f = functional.one_hot(experts, E).sum((0, 1)) / experts.numel()
    return E * (f * scores.mean(0)).sum()


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_the_balance_loss_is_its_definition(kind: Any) -> None:
    moe = MoEConfig(num_experts=E, moe_router_load_balancing_type=kind)
    logits = torch.randn(T, E)
    found = routing.balance_scores(logits, moe)
    loss = balance.balance_loss(found, 2, moe, ALONE)
    parts = [slice(None)] if kind != "seq_aux_loss" else [slice(0, None, 2), slice(1, None, 2)]
    each = [switch_loss(found.weights[part], found.experts[part]) for part in parts]
    torch.testing.assert_close(loss, torch.stack(each).mean())
    one = replace(moe, moe_router_topk=1, moe_router_pre_softmax=True)
    even = torch.eye(E).repeat_interleave(2, 0).repeat(3, 1) * 50.0  # both sequences alike
    assert balance.balance_loss(routing.balance_scores(even, one), 2, one, ALONE) == pytest.approx(
        1.0
    )


def test_choices_of_a_step_are_a_running_mean() -> None:
    step = balance.StepChoices()
    assert step.add(torch.tensor([4.0, 0.0])).tolist() == [4.0, 0.0]
    assert step.add(torch.tensor([0.0, 2.0])).tolist() == [2.0, 1.0]


def test_losses_reach_the_router_with_their_weight() -> None:
    x, coefficient, weight = tokens().flatten(0, 1), 0.1, 0.25
    router = mixture(moe_aux_loss_coeff=coefficient, moe_z_loss_coeff=0.01).router
    router.begin_step(weight, per_token=False)
    chosen, _ = router(x, 2)
    chosen.weights.sum().backward()
    logits = functional.linear(x, router.weight)
    scores = routing.balance_scores(logits, router.moe)
    total = weight * coefficient * switch_loss(scores.weights, scores.experts)
    total = total + weight * 0.01 * torch.logsumexp(logits, -1).square().mean()
    (expected,) = torch.autograd.grad(total, router.weight)
    assert router.weight.grad is not None
    torch.testing.assert_close(router.weight.grad, expected, **FP32_SUM_ORDER)


@pytest.mark.parametrize("granularity", ["none", "full"])
def test_recomputation_counts_no_token_twice(granularity: Any) -> None:
    c = replace(config(moe_aux_loss_coeff=0.1), recompute_granularity=granularity)
    model = GPTModel(c, 64)
    init_parameters(model, 3)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids, "labels": ids, "dropout_seed": torch.tensor(0)}
    model.forward_step(None, batch).mean().backward()
    router = model.decoder.layers["1"].mlp.router  # type: ignore[union-attr]
    assert isinstance(router, Router)
    assert router.sums[:E].sum() == 2 * 16 * K
    model.eval()
    model.forward_step(None, batch)
    assert router.sums[:E].sum() == 2 * 16 * K


def test_layers_between_mixtures_are_dense() -> None:
    c = GPTConfig(**SMALL | LLAMA, moe=MoEConfig(num_experts=E, moe_layer_freq="[0,1,0,1]"))
    model = GPTModel(c, 64)
    kinds = [isinstance(layer.mlp, MixtureOfExperts) for layer in model.decoder.layers.values()]
    assert kinds == [False, True, False, True]
    assert sum(p.numel() for p in model.parameters()) == c.num_params(64)
