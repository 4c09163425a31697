"""The model's names, its laws, and its first values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.models import small_gpt
from trainyard.attention.masks import AttentionMask
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import draw_parameter, init_parameters

ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
"""fp32 sums of a few hundred terms taken in another order."""

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 24,
}
GPT: dict[str, Any] = {}
LLAMA = small_gpt.LLAMA | {"untie_embeddings_and_output_weights": True}
QWEN = LLAMA | {"add_qkv_bias": True, "rotary_percent": 0.5, "kv_channels": 32}
BARE = {"position_embedding_type": "none", "untie_embeddings_and_output_weights": True}
QWEN3 = LLAMA | {"qk_layernorm": True, "apply_layernorm_1p": True}
LLAMA4 = QWEN3 | {"qk_l2_norm": True}
YARN = LLAMA | {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "window_size": "7,0",
    "window_attn_skip_freq": "2",
}
SINKS = {"softmax_type": "learnable", "quick_geglu": True, "fp32_residual_connection": True}
LEAN = {"squared_relu": True, "disable_bias_linear": True, "softmax_type": "off-by-one"}
KINDS = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": QWEN,
    "bare": BARE,
    "qwen3": QWEN3,
    "llama 4": LLAMA4,
    "yarn": YARN,
    "sinks": SINKS,
    "lean": LEAN,
}
VOCAB = 96

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def build(seed: int = 7, true_vocab_size: int | None = None, **changes: Any) -> GPTModel:
    sizes: dict[str, Any] = {"true_vocab_size": true_vocab_size}
    model = GPTModel(GPTConfig(**(SMALL | changes)), VOCAB, **sizes)
    init_parameters(model, seed)
    return model.eval()


def some_tokens(b: int = 2, s: int = 24) -> torch.Tensor:
    return torch.randint(0, VOCAB, (b, s), generator=torch.Generator().manual_seed(3))


def test_parameters_have_megatron_core_names_and_shapes() -> None:
    shapes = {name: tuple(p.shape) for name, p in build(**QWEN).named_parameters()}
    layer = "decoder.layers.1."
    assert shapes[layer + "self_attention.linear_qkv.weight"] == ((4 + 2 * 2) * 32, 64)
    assert shapes[layer + "self_attention.linear_qkv.bias"] == ((4 + 2 * 2) * 32,)
    assert shapes[layer + "self_attention.linear_proj.weight"] == (64, 4 * 32)
    assert shapes[layer + "mlp.linear_fc1.weight"] == (2 * 128, 64)
    assert shapes[layer + "mlp.linear_fc2.weight"] == (64, 128)
    assert {name for name in shapes if "layers.0" not in name and "layers.1" not in name} == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert layer + "input_layernorm.bias" not in shapes
    learned = dict(build().named_parameters())
    assert learned["embedding.position_embeddings.weight"].shape == (24, 64)
    assert "output_layer.weight" not in learned


@every_kind
def test_config_counts_the_parameters_exactly(kind: dict[str, Any]) -> None:
    model = build(**kind)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_params(VOCAB)


@every_kind
def test_loss_is_cross_entropy_of_the_logits(kind: dict[str, Any]) -> None:
    model, tokens = build(**kind), some_tokens()
    labels = tokens.roll(-1, dims=1)
    expected = functional.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(model.loss(tokens, labels), expected, **ROUNDING)


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
def test_rows_that_pad_the_vocabulary_are_neither_scored_nor_trained(kind: dict[str, Any]) -> None:
    tokens, (whole, padded) = some_tokens() % 50, (build(**kind), build(**kind, true_vocab_size=50))
    tables = [p for p in padded.parameters() if p.shape[0] == VOCAB]
    assert len(tables) == (2 if kind else 1)
    with torch.no_grad():
        for table in tables:
            table[50:] = 100.0
    assert padded(tokens).shape == (2, 24, 50)
    torch.testing.assert_close(padded(tokens), whole(tokens)[..., :50], **ROUNDING)
    labels = tokens.roll(-1, dims=1)
    losses = padded.loss(tokens, labels)
    of_tokens = whole(tokens)[..., :50].transpose(1, 2)
    torch.testing.assert_close(
        losses, functional.cross_entropy(of_tokens, labels, reduction="none"), **ROUNDING
    )
    losses.mean().backward()
    for table in tables:
        assert table.grad is not None
        assert not table.grad[50:].any(), "zero, and not nearly so"
        assert table.grad[:50].any()


@every_kind
def test_the_future_changes_nothing_before_it(kind: dict[str, Any]) -> None:
    model, tokens = build(**kind), some_tokens()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], **ROUNDING)
    assert (before[:, 12:] - after[:, 12:]).abs().min(dim=-1).values.max() > 0


@every_kind
def test_gradients_reach_every_parameter(kind: dict[str, Any]) -> None:
    model, tokens = build(**kind).train(), some_tokens()
    model.loss(tokens, tokens.roll(-1, dims=1)).mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert without == []


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped = build(**LLAMA)
    full = build(**(LLAMA | {"group_query_attention": False, "num_query_groups": 1}))
    state = dict(grouped.state_dict())
    for name in [n for n in state if n.endswith("linear_qkv.weight")]:
        q, k, v = state[name].view(2, 4, 16, 64).split((2, 1, 1), dim=1)
        repeated = torch.stack((q, k.expand_as(q), v.expand_as(q)), dim=2)  # (g, n/g, 3, d, h)
        state[name] = repeated.reshape(-1, 64)
    full.load_state_dict(state)
    tokens = some_tokens()
    torch.testing.assert_close(full(tokens), grouped(tokens), **ROUNDING)


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["learned", "rope"])
def test_bounds_and_positions_make_documents_strangers(kind: dict[str, Any]) -> None:
    model = build(**kind)
    first, second = some_tokens(1, 9), some_tokens(1, 15)
    packed = torch.cat((first, second), dim=1)
    positions = torch.cat((torch.arange(9), torch.arange(15))).unsqueeze(0)
    bounds = torch.full((1, 25), 24)
    bounds[0, :2] = torch.tensor([0, 9])
    logits = model(packed, positions, attention_mask=AttentionMask(bounds=bounds))
    torch.testing.assert_close(logits[:, :9], model(first), **ROUNDING)
    torch.testing.assert_close(logits[:, 9:], model(second), **ROUNDING)


def test_dropout_acts_in_training_only() -> None:
    model, tokens = build(hidden_dropout=0.3, attention_dropout=0.3), some_tokens()
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_first_values_have_their_standard_deviations() -> None:
    model = build(hidden_size=256, num_attention_heads=4, num_layers=8, init_method_std=0.03)
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if name.endswith(".bias"):
            assert not values.any(), name
        elif name.endswith("layernorm.weight"):
            assert (values == 1).all(), name
        else:
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = 0.03 / math.sqrt(2 * 8) if residual else 0.03
            assert values.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(values.mean().item()) < std / 10, name


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    tokens = some_tokens()
    loss = build(**LLAMA).loss(tokens, tokens.roll(-1, dims=1)).mean()
    assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.1)


def test_first_values_depend_on_name_and_seed_alone() -> None:
    torch.manual_seed(1)
    one = build(seed=11, **LLAMA)
    torch.manual_seed(2)
    deeper = build(seed=11, **(LLAMA | {"seq_length": 48}))
    other = build(seed=12, **LLAMA)
    drawn: set[bytes] = set()
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, deeper.get_parameter(name))
        alone = draw_parameter(name, parameter.shape, one.config, 11)
        assert torch.equal(parameter, alone)
        if not name.endswith("layernorm.weight"):
            assert not torch.equal(parameter, other.get_parameter(name))
            drawn.add(alone.flatten()[:8].numpy().tobytes())
    assert len(drawn) == 2 + 2 * 4


def test_building_and_filling_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build()
    assert torch.equal(before, torch.get_rng_state())


@every_kind
def test_bf16_model_gives_fp32_losses(kind: dict[str, Any]) -> None:
    model, tokens = build(**kind).bfloat16(), some_tokens()
    losses = model.loss(tokens, tokens.roll(-1, dims=1))
    assert losses.dtype == torch.float32
    assert losses.mean().item() == pytest.approx(math.log(VOCAB), abs=0.1)
    losses.mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("fp32", [False, True])
def test_the_residual_stream_is_in_its_dtype(fp32: bool) -> None:
    model = build(fp32_residual_connection=fp32).bfloat16()
    seen: list[torch.dtype] = []
    for layer in model.decoder.layers.values():
        layer.register_forward_hook(lambda _, args, out: seen.extend((args[0].dtype, out.dtype)))
    assert model(some_tokens()).dtype == torch.bfloat16
    assert set(seen) == {torch.float32 if fp32 else torch.bfloat16}


def test_a_packed_batch_has_documents_that_are_strangers() -> None:
    model, tokens = build(**LLAMA), some_tokens(1)
    places = torch.cat((torch.arange(9), torch.arange(15))).unsqueeze(0)
    batch = {"tokens": tokens, "labels": tokens, "position_ids": places}
    bounds = torch.tensor([[0, 9, 24, 24]], dtype=torch.int32)
    losses = model.forward_step(None, batch | {"cu_seqlens": bounds})
    alone = [model.loss(part, part) for part in (tokens[:, :9], tokens[:, 9:])]
    torch.testing.assert_close(losses, torch.cat(alone, dim=1), **ROUNDING)


def test_dropout_follows_its_seed() -> None:
    model, tokens = build(hidden_dropout=0.3, attention_dropout=0.0).train(), some_tokens()
    one, again, other = (
        model.loss(tokens, tokens, dropout_seed=torch.tensor(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
