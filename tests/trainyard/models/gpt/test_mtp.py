"""Multi-token prediction in one process: what each depth sees and predicts, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from trainyard.attention.masks import CAUSAL
from trainyard.errors import ConfigError
from trainyard.models.costs.flops import flops_per_iteration
from trainyard.models.costs.memory_detail import parameters_here
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.losses import Losses
from trainyard.models.mtp import shifted
from trainyard.models.mtp_config import MTPConfig
from trainyard.models.parallel_layout import ParallelLayout

VOCAB = 48
OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 12,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
}
TWO = MTPConfig(mtp_num_layers=2)


def model_of(prediction: MTPConfig = TWO, **changes: Any) -> GPTModel:
    model = GPTModel(GPTConfig(**(OPTIONS | changes), prediction=prediction), VOCAB)
    init_parameters(model, 1)
    return model


def batch_of(seed: int = 4) -> dict[str, torch.Tensor]:
    text = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 12)
    mask[0, 3] = mask[1, 9] = 0.0
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}


def test_each_depth_is_the_equations_of_the_paper_on_a_shorter_text() -> None:
    """Position i of depth k sees h of depth k - 1 at i and token i + k, and predicts i + k + 1."""
    model, batch = model_of(), batch_of()
    found = model.forward_step(None, batch)
    assert isinstance(found, Losses)
    assert model.mtp is not None
    assert model.embedding is not None
    table = model.embedding.word_embeddings.weight
    hidden = model.hidden_states(batch["tokens"])  # (s, b, h)
    for k, (name, depth) in enumerate(
        zip(("mtp_1 loss", "mtp_2 loss"), model.mtp.layers.values(), strict=True), 1
    ):
        hidden = hidden[: 12 - k]
        embedded = functional.embedding(batch["tokens"][:, k:].t(), table)
        joined = torch.cat((depth.enorm(embedded), depth.hnorm(hidden)), -1)
        inputs = model.enter(model.decoder, None, batch["tokens"][:, k:], CAUSAL).inputs
        x = depth.transformer_layer(functional.linear(joined, depth.eh_proj.weight), inputs)
        hidden = depth.final_layernorm(x)
        losses = functional.cross_entropy(
            (hidden @ table.t()).permute(1, 2, 0), batch["labels"][:, k:], reduction="none"
        )
        mask = batch["loss_mask"][:, k:]
        expected = (losses * mask).sum() / mask.sum()
        torch.testing.assert_close(found.means[name], expected, rtol=1e-5, atol=1e-6)
    assert dict(found.factors) == {"mtp_1 loss": 0.05, "mtp_2 loss": 0.05}


def test_a_document_predicts_nothing_of_the_next_one() -> None:
    batch = batch_of() | {"cu_seqlens": torch.tensor([[0, 5, 12], [0, 12, 12]])}
    batch["loss_mask"] = torch.ones(2, 12)
    one, two = shifted(batch, 2, None)
    assert one.loss_mask.tolist() == [[1] * 4 + [0] + [1] * 6 + [0], [1] * 11 + [0]]
    assert two.loss_mask.tolist() == [[1] * 3 + [0, 0] + [1] * 5 + [0, 0], [1] * 10 + [0, 0]]
    assert torch.equal(two.labels[:, :-2], batch["labels"][:, 2:])
    assert int(one.num_tokens) == 10 + 11


def test_the_tokens_of_a_text_are_predicted_without_the_further_layers() -> None:
    with_layers, without = model_of().eval(), model_of(MTPConfig()).eval()
    tokens = batch_of()["tokens"]
    assert torch.equal(with_layers(tokens), without(tokens))


@pytest.mark.parametrize("untied", [False, True])
def test_every_parameter_is_counted(untied: bool) -> None:
    model = model_of(untie_embeddings_and_output_weights=untied)
    count = sum(p.numel() for p in model.parameters())
    assert count == model.config.num_params(VOCAB)
    here = parameters_here(
        model.config, VOCAB, ParallelLayout(), range(4), has_embedding=True, has_output=True
    )
    assert here == count


def test_flops_count_the_layer_the_joining_matrix_and_the_output_layer_of_each_depth() -> None:
    h, s = 32, 12
    plain, more = (flops_per_iteration(model_of(m).config, VOCAB, 1) for m in (MTPConfig(), TWO))
    layer = 4 * h * h + 8 * h * h + s * h
    assert more - plain == 6 * s * 2 * (layer + 2 * h * h + h * VOCAB)


@pytest.mark.parametrize(
    ("prediction", "changes", "said"),
    [
        (TWO, {"position_embedding_type": "learned_absolute"}, "give rope, yarn or none"),
        (MTPConfig(mtp_num_layers=12), {}, r"\(12\) must be below --seq-length \(12\)"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    prediction: MTPConfig, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        GPTConfig(**(OPTIONS | changes), prediction=prediction)
