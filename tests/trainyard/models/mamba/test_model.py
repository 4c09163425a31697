"""A hybrid as a whole: its parameters, documents, states, and options that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainyard.attention.masks import AttentionMask
from trainyard.errors import ConfigError
from trainyard.inference.kv_cache import StaticKVCache
from trainyard.models.init import init_parameters
from trainyard.models.latent_config import LatentConfig
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.model import MambaModel
from trainyard.models.mamba.pattern import spread
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.training.options.fp8_checks import check_fp8

OPTIONS: dict[str, Any] = {
    "num_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 12,
    "hybrid_layer_pattern": "MM*-M",
    "mamba_state_dim": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 4,
    "position_embedding_type": "none",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
}
VOCAB = 40
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def model_of(**options: Any) -> MambaModel:
    model = MambaModel(MambaConfig(**OPTIONS | options), VOCAB)
    init_parameters(model, 3)
    return model


def test_the_ratios_give_the_published_pattern_of_the_8b_hybrid() -> None:
    """nvidia/mamba2-hybrid-8b-3t-4k: 24 Mamba-2 layers, 4 of attention, 28 MLPs."""
    published = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
    assert spread(56, 0.08, 0.5) == published
    assert spread(9, 0.0, 0.0) == "MMMMMMMMM"
    assert spread(9, 0.0, 1.0) == "---------"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hybrid_layer_pattern": None, "mamba_num_heads": 10, "normalization": "RMSNorm"},
        {"hybrid_layer_pattern": "*-*-M", "disable_bias_linear": True, "swiglu": True},
    ],
)
def test_parameters_are_counted_exactly(options: dict[str, Any]) -> None:
    model = model_of(**options)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_params(VOCAB)


def test_state_space_parameters_begin_as_the_papers() -> None:
    mixer = model_of().decoder.layers["0"].mixer
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert 1e-4 <= float(steps.detach().min()) <= float(steps.detach().max()) <= 0.1 + 1e-6
    rates = mixer.A_log.detach().exp()
    assert 1.0 <= float(rates.min()) <= float(rates.max()) <= 16.0
    assert bool((mixer.D == 1).all() and (mixer.norm.weight == 1).all())
    assert 0.3 < float(mixer.conv1d.weight.detach().abs().max()) <= 0.5


def test_documents_do_not_see_each_other() -> None:
    model = model_of()
    tokens = torch.randint(VOCAB, (1, 12))
    bounds = torch.tensor([[0, 5, 12]], dtype=torch.int32)
    packed = model(tokens, attention_mask=AttentionMask(bounds=bounds))
    alone = torch.cat((model(tokens[:, :5]), model(tokens[:, 5:])), dim=1)
    torch.testing.assert_close(packed, alone, **CLOSE)


@pytest.mark.parametrize("chunk_size", [1, 5, 128])
def test_the_size_of_chunks_changes_nothing(chunk_size: int) -> None:
    tokens = torch.randint(VOCAB, (2, 12))
    found = model_of(mamba_chunk_size=chunk_size)(tokens)
    torch.testing.assert_close(found, model_of()(tokens), **CLOSE)


@torch.no_grad()
def test_pieces_of_texts_through_a_cache_equal_the_whole() -> None:
    model, lengths = model_of().eval(), [(2, 7), (1, 1), (5, 2), (1, 1), (3, 1)]
    texts = [torch.randint(VOCAB, (1, sum(own))) for own in zip(*lengths, strict=True)]
    cache, parts = StaticKVCache(model.config, 2, 16), ([], [])
    for counts in lengths:
        tokens = torch.full((2, max(counts)), VOCAB - 1)
        for row, count in enumerate(counts):
            begin = cache.lengths[row]
            tokens[row, :count] = texts[row][0, begin : begin + count]
        cache.begin(counts)
        logits = model(tokens, kv_cache=cache)
        cache.advance()
        for row, count in enumerate(counts):
            parts[row].append(logits[row, :count])
    for text, found in zip(texts, parts, strict=True):
        torch.testing.assert_close(torch.cat(found), model(text)[0], **CLOSE)


def test_recomputed_layers_have_the_same_gradients() -> None:
    tokens = torch.randint(VOCAB, (2, 12))
    gradients = []
    for options in (
        {},
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "layernorm", "mlp"),
        },
        {"recompute_granularity": "full"},
    ):
        model = model_of(**options).train()
        model.loss(tokens, tokens).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))  # type: ignore[arg-type]


def test_time_steps_keep_to_their_limits() -> None:
    model, tokens = model_of(), torch.randint(VOCAB, (1, 12))
    wide = model_of(mamba_dt_min=1e-9, mamba_dt_max=1e9)
    assert torch.equal(model(tokens), wide(tokens))
    assert not torch.allclose(model(tokens), model_of(mamba_dt_min=1.0)(tokens))


def test_layers_that_add_once_begin_larger_in_a_hybrid() -> None:
    def scale(model: MambaModel) -> torch.Tensor:
        return model.decoder.layers["0"].mixer.out_proj.weight.detach()

    torch.testing.assert_close(scale(model_of(is_hybrid_model=True)), scale(model_of()) * 2**0.5)


def test_experts_stand_where_the_letters_say() -> None:
    moe = MoEConfig(num_experts=2)
    config = MambaConfig(**OPTIONS | {"hybrid_layer_pattern": "MEM*E", "moe": moe})
    assert [config.has_experts(layer) for layer in range(5)] == [False, True, False, False, True]
    model = MambaModel(config, VOCAB)
    assert sum(p.numel() for p in model.parameters()) == config.num_params(VOCAB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hybrid_layer_pattern": "MMX-M"}, "'X' is no kind of layer; known are M"),
        ({"hybrid_layer_pattern": "MM|*-"}, r"\| ends a pipeline stage"),
        ({"hybrid_layer_pattern": "MM/*-"}, "multi-token prediction"),
        ({"hybrid_layer_pattern": "MMG*-"}, "G is a gated delta net, which hybrid models do not"),
        ({"hybrid_layer_pattern": "MMD*-"}, "D is DeepSeek's sparse attention, which hybrid mod"),
        ({"hybrid_layer_pattern": "MM+*-"}, r"\+ is latent attention, which hybrid models do not"),
        ({"hybrid_layer_pattern": "MM"}, "has 2 layers, and --num-layers says 5"),
        ({"hybrid_attention_ratio": 1.5}, "must be from 0 to 1"),
        ({"hybrid_attention_ratio": 0.6, "hybrid_mlp_ratio": 0.6}, "must be 1 at most in all"),
        ({"mamba_num_groups": 3}, "--mamba-num-heads"),
        ({"mamba_head_dim": 7}, "must be divisible by --mamba-head-dim"),
        ({"mamba_dt_min": 2.0, "mamba_dt_max": 1.0}, "--mamba-dt-max"),
        ({"hybrid_layer_pattern": "MM*-E"}, "needs --num-experts"),
        ({"mla": LatentConfig(multi_latent_attention=True)}, "--multi-latent-attention: --model-t"),
        (
            {"prediction": MTPConfig(mtp_num_layers=1)},
            "--mtp-num-layers: --model-type mamba has",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MambaConfig(**OPTIONS | options)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size .2. does not apply"),
        ({"tensor_model_parallel_size": 4}, "--mamba-num-groups"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MambaConfig(**OPTIONS).check_parallel(ParallelConfig(**parallel))


def test_8_bit_products_need_aligned_projections() -> None:
    sizes = {"hidden_size": 64, "mamba_head_dim": 16, "mamba_state_dim": 16, "seq_length": 16}
    fp8 = PrecisionConfig(bf16=True, fp8_format="hybrid")
    fits = MambaConfig(**OPTIONS | sizes | {"mamba_num_heads": 16})
    check_fp8(fits, fp8, ParallelConfig(), 1)
    odd = MambaConfig(**OPTIONS | sizes | {"mamba_num_heads": 8})
    with pytest.raises(ConfigError, match=r"what a Mamba layer projects is 328, .* multiple of 16"):
        check_fp8(odd, fp8, ParallelConfig(), 1)
