"""T5: what padding may not change, stages, and the loss of Megatron-LM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from trainyard.attention.masks import AttentionMask
from trainyard.errors import ConfigError
from trainyard.models.init import init_parameters
from trainyard.models.layer_inputs import LayerInputs
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.model import T5Model
from trainyard.models.t5.positions import distance_buckets
from trainyard.models.tied import EMBEDDING, is_copy

ROWS, LENGTH, DECODER = 64, 16, 8
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "decoder_num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "seq_length": LENGTH,
    "decoder_seq_length": DECODER,
    "init_method_std": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "Megatron-LM's": {},
    "Google's": {
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "softmax_scale": 1.0,
        "relu": True,
        "lm_head_bias": False,
        "scale_lm_head_input": True,
    },
    "fp32 residual": {"fp32_residual_connection": True},
    "untied, RoPE": {
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "geglu": True,
    },
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, stage: PipelineStage | None = None, **options: Any) -> T5Model:
    config = T5Config(**(SIZES | KINDS[kind] | options))
    model = T5Model(config, ROWS, pipeline_stage=stage or PipelineStage(None))
    init_parameters(model, 1)
    return model.eval()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = (torch.tensor([[16], [11], [5]]), torch.tensor([[8], [3], [6]]))
    enc_mask, dec_mask = (
        (torch.arange(s) < length).long()
        for s, length in zip((LENGTH, DECODER), lengths, strict=True)
    )
    labels = torch.randint(ROWS, (3, DECODER), generator=generator)
    return {
        "text_enc": torch.randint(ROWS, (3, LENGTH), generator=generator),
        "text_dec": torch.randint(ROWS, (3, DECODER), generator=generator),
        "enc_mask": enc_mask,
        "dec_mask": dec_mask,
        "labels": torch.where(dec_mask.bool(), labels, -1),
        "loss_mask": dec_mask.float(),
    }


@each_kind
def test_its_parameters_are_as_many_as_its_options_say(kind: str) -> None:
    model = build(kind)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_params(ROWS)


@pytest.mark.few_cases(2)
@each_kind
def test_a_padded_row_gives_what_it_gives_alone_without_padding(kind: str) -> None:
    model, given = build(kind), batch()
    logits = model(given["text_enc"], given["text_dec"], given["enc_mask"])
    assert logits.shape == (3, DECODER, ROWS)
    lengths = [given[name].sum(dim=1).tolist() for name in ("enc_mask", "dec_mask")]
    for row, (of_encoder, of_decoder) in enumerate(zip(*lengths, strict=True)):
        alone = model(
            given["text_enc"][row : row + 1, :of_encoder],
            given["text_dec"][row : row + 1, :of_decoder],
        )
        torch.testing.assert_close(logits[row, :of_decoder], alone[0], rtol=0, atol=1e-5)


def test_masks_are_rules_equal_to_the_dense_masks_of_megatron() -> None:
    """Megatron-LM multiplies the padding masks to (b, 1, s, t), for the decoder with causality."""
    model, given = build("Megatron-LM's"), batch()
    of_encoder, of_decoder = given["enc_mask"].bool(), given["dec_mask"].bool()

    def dense(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (queries.unsqueeze(2) & keys.unsqueeze(1)).unsqueeze(1)

    causal = torch.ones(DECODER, DECODER).tril().bool()
    masks = (
        dense(of_encoder, of_encoder),
        dense(of_decoder, of_decoder) & causal,
        dense(of_decoder, of_encoder),
    )
    own, self_mask, cross = (AttentionMask(causal=False, dense=mask) for mask in masks)
    assert model.embedding is not None
    places = [torch.arange(s).unsqueeze(0) for s in (LENGTH, DECODER)]
    source = model.encoder(model.embedding(given["text_enc"], places[0]), LayerInputs(None, own))
    inputs = LayerInputs(None, self_mask, source=source, source_mask=cross)
    hidden = model.decoder(model.embedding(given["text_dec"], places[1]), inputs)
    losses = model.losses(hidden, given["labels"])
    by_rule = model.forward_step(None, given)
    torch.testing.assert_close(by_rule[of_decoder], losses[of_decoder])


def test_a_decoder_sees_no_later_token() -> None:
    model, given = build("Google's"), batch()
    before = model(given["text_enc"], given["text_dec"])
    changed = given["text_dec"].clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % ROWS
    after = model(given["text_enc"], changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.equal(after[:, 5:], before[:, 5:])


def test_its_losses_are_those_of_megatron() -> None:
    """pretrain_t5.py: cross entropy of every token, to be averaged over the loss mask."""
    model, given = build("Megatron-LM's"), batch()
    losses = model.forward_step(None, given)
    logits = model(given["text_enc"], given["text_dec"], given["enc_mask"])
    asked = given["loss_mask"].bool()
    expected = functional.cross_entropy(logits[asked], given["labels"][asked], reduction="none")
    torch.testing.assert_close(losses[asked], expected)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("kind", ["Megatron-LM's", "fp32 residual", "untied, RoPE"])
@pytest.mark.parametrize("boundaries", [[0, 2, 5], [0, 1, 4, 5], [0, 0, 3, 5, 5]])
def test_chained_stages_are_the_whole(kind: str, boundaries: list[int]) -> None:
    last = len(boundaries) - 2
    stages = [
        PipelineStage(range(*boundaries[i : i + 2]), i == 0, i == last) for i in range(last + 1)
    ]
    given = {**batch(), "dropout_seed": torch.tensor(77)}
    results: list[dict[str, torch.Tensor]] = []
    for parts in ([PipelineStage(None)], stages):
        models = [build(kind, stage, attention_dropout=0.0) for stage in parts]
        if kind == "fp32 residual":  # which passes beside weights in 16 bits
            models = [model.bfloat16() for model in models]
        out: torch.Tensor | None = None
        for model in models:
            out = model.train().forward_step(out, given)
        assert out is not None
        (out * given["loss_mask"]).sum().backward()
        found = {"loss": out.detach()}
        for model in models:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                name = EMBEDDING if is_copy(parameter) else name
                found[name] = found.get(name, torch.zeros(())) + parameter.grad
        results.append(found)
    whole, chained = results
    assert chained.keys() == whole.keys()
    for name, expected in whole.items():
        rounding = 1e-6 if expected.dtype == torch.float32 else 0.02 * float(expected.abs().max())
        torch.testing.assert_close(chained[name], expected, rtol=0, atol=rounding, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Megatron-LM's", "Google's"])
def test_layers_compile_without_a_break(kind: str) -> None:
    model, given = build(kind, attention_dropout=0.0).train(), batch()
    given["dropout_seed"] = torch.tensor(77)
    expected = model.forward_step(None, given)
    torch._dynamo.reset()
    for block in (model.encoder, model.decoder):
        for layer in block.layers.values():
            layer.forward = torch.compile(  # type: ignore[method-assign]
                layer.forward, fullgraph=True, dynamic=False, backend="aot_eager"
            )
    compiled = model.forward_step(None, given)
    torch.testing.assert_close(compiled, expected)
    parameters = list(model.parameters())
    found, right = (
        torch.autograd.grad((losses * given["loss_mask"]).sum(), parameters)
        for losses in (compiled, expected)
    )
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_encoder_and_decoder_drop_different_numbers() -> None:
    model = build("Megatron-LM's", decoder_seq_length=LENGTH).train()
    places = [torch.arange(LENGTH)] * 2
    dropout = model._places_of_dropout(torch.tensor(5), places)
    seeds = [
        int(place.seed)
        for part, layers in zip(dropout, (2, 3), strict=True)
        if part is not None
        for place in [*map(part.of_layer, range(layers)), part.of_embedding()]
    ]
    assert len(set(seeds)) == 2 + 3 + 2


def test_distances_that_are_near_have_a_bucket_each() -> None:
    distances = torch.arange(-20, 21)
    both = distance_buckets(distances, 8, 12, True).tolist()
    assert both[20] == 0
    assert both[19:14:-1] == [1, 2, 2, 2, 3]
    assert both[21:26] == [5, 6, 6, 6, 7]
    past = distance_buckets(distances, 8, 12, False).tolist()
    assert past[20:] == [0] * 21
    assert past[19:14:-1] == [1, 2, 3, 4, 4]
    assert set(past) == set(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": "3,0"}, "--window-size 3,0: a T5 looks at all tokens"),
        ({"decoder_num_layers": 0}, "--decoder-num-layers must be .*0"),
        ({"decoder_seq_length": 32}, r"--max-position-embeddings \(16\) .* \(32\)"),
        ({"relu": True, "geglu": True}, "--relu and --geglu exclude each other"),
        (
            {"position_embedding_type": "relative", "relative_attention_num_buckets": 7},
            "--relative-attention-num-buckets must be even and at least 4, got 7",
        ),
        (
            {"position_embedding_type": "relative", "relative_attention_max_distance": 16},
            r"--relative-attention-max-distance \(16\) must be above half of .* \(32\)",
        ),
        (
            {"position_embedding_type": "relative", "softmax_type": "learnable"},
            "--softmax-type learnable does not go with --position-embedding-type relative",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        T5Config(**(SIZES | options))
