"""BERT: what padding may not change, and the losses of Megatron-LM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from trainyard.attention.masks import AttentionMask, mask_of_padding
from trainyard.errors import ConfigError
from trainyard.models.bert.config import SOP_LOSS, BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.init import init_parameters
from trainyard.models.losses import Losses

ROWS, LENGTH = 64, 16
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "init_method_std": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "Megatron-LM's": {},
    "post-norm": {"post_layernorm": True},
    "without a binary head": {"bert_binary_head": False},
    "untied, RoPE": {
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
    },
}


def build(true_vocab_size: int | None = None, **options: Any) -> BertModel:
    model = BertModel(BertConfig(**SIZES, **options), ROWS, true_vocab_size=true_vocab_size)
    init_parameters(model, 1)
    return model.eval()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(ROWS, (3, LENGTH), generator=generator)
    padding_mask = (torch.arange(LENGTH) < torch.tensor([[16], [11], [5]])).long()
    labels = torch.where((torch.arange(LENGTH) % 4 == 1) & padding_mask.bool(), text, -1)
    return {
        "text": text,
        "types": (torch.arange(LENGTH) > 6).long().expand(3, -1),
        "padding_mask": padding_mask,
        "labels": labels,
        "loss_mask": (labels >= 0).float(),
        "is_random": torch.tensor([1, 0, 1]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_its_parameters_are_as_many_as_its_options_say(kind: str) -> None:
    model = build(**KINDS[kind])
    assert sum(p.numel() for p in model.parameters()) == model.config.num_params(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_row_gives_what_it_gives_alone_without_padding(kind: str) -> None:
    model, given = build(**KINDS[kind]), batch()
    hidden = model.encode(given["text"], given["padding_mask"], given["types"])
    predicted = model(given["text"], given["padding_mask"], given["types"])
    assert hidden.shape == (3, LENGTH, 32)
    for row, length in enumerate(given["padding_mask"].sum(dim=1).tolist()):
        alone = [given[name][row : row + 1, :length] for name in ("text", "types")]
        torch.testing.assert_close(
            hidden[row, :length], model.encode(alone[0], None, alone[1])[0], rtol=0, atol=1e-5
        )
        order = model(alone[0], None, alone[1]).order
        if order is not None:
            torch.testing.assert_close(predicted.order[row], order[0], rtol=0, atol=1e-5)


def test_padding_is_a_rule_equal_to_the_dense_mask_of_megatron() -> None:
    """Megatron-LM multiplies the padding mask with itself to (b, 1, s, s)."""
    padding_mask = batch()["padding_mask"]
    mask = mask_of_padding(padding_mask)
    assert mask.dense is None
    assert mask.bounds is not None
    assert mask.bounds.tolist() == [[0, 16, 16], [0, 11, 16], [0, 5, 16]]
    model, given = build(), batch()
    real = padding_mask.bool()
    dense = AttentionMask(causal=False, dense=(real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1))
    by_rule, by_matrix = (
        model.run_layers(model.encoder, None, given["text"], one, token_types=given["types"])
        for one in (mask, dense)
    )
    torch.testing.assert_close(by_rule.transpose(0, 1)[real], by_matrix.transpose(0, 1)[real])


def test_its_losses_are_those_of_megatron() -> None:
    """pretrain_bert.py: cross entropy of every token, to be averaged over the loss mask, and of the
    order of sentences; padding of the vocabulary takes no part."""
    model, given = build(true_vocab_size=50), batch()
    given["text"], given["labels"] = given["text"] % 50, given["labels"].clamp(max=49)
    losses = model.forward_step(None, given)
    assert isinstance(losses, Losses)
    words, order = model(given["text"], given["padding_mask"], given["types"])
    assert words.shape == (3, LENGTH, 50)
    asked = given["loss_mask"].bool()
    expected = functional.cross_entropy(words[asked], given["labels"][asked], reduction="none")
    torch.testing.assert_close(losses.of_tokens[asked], expected)
    sop = functional.cross_entropy(order, given["is_random"])
    torch.testing.assert_close(losses.means[SOP_LOSS], sop)
    without = build(bert_binary_head=False).forward_step(None, {**batch(), "is_random": order})
    assert isinstance(without, Losses)
    assert without.means == {}


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="--num-tokentypes 0 with --bert-binary-head"):
        BertConfig(**SIZES, num_tokentypes=0)
    with pytest.raises(ConfigError, match="--num-tokentypes must be at least 0, got -1"):
        BertConfig(**SIZES, num_tokentypes=-1, bert_binary_head=False)
    with pytest.raises(ConfigError, match="--qk-l2-norm is for --model-type gpt"):
        BertConfig(**SIZES, qk_l2_norm=True)
    with pytest.raises(ConfigError, match="--recompute-modules layernorm"):
        BertConfig(
            **SIZES,
            post_layernorm=True,
            recompute_activations=True,
            recompute_modules=("layernorm",),
        )
