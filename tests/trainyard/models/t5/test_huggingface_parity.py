"""Logits and gradients against transformers' T5, and its folders both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.trainyard.models.perturbed import perturb
from trainyard.artifacts import store
from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.config import model_document
from trainyard.conversion.huggingface.folder import write_hf_folder
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.init import init_parameters
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.model import T5Model

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, DECODER = 96, 40, 24
SAME_LOGITS = {"rtol": 1e-4, "atol": 1e-5}
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "decoder_num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "seq_length": LENGTH,
    "decoder_seq_length": DECODER,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "disable_bias_linear": True,
    "softmax_scale": 1.0,
    "lm_head_bias": False,
    "make_vocab_size_divisible_by": ROWS,
}
KINDS: dict[str, dict[str, Any]] = {
    "t5": {"relu": True, "scale_lm_head_input": True},
    "t5 v1.1": {"geglu": True, "untie_embeddings_and_output_weights": True},
    "gated silu": {"swiglu": True, "scale_lm_head_input": True, "ffn_hidden_size": 48},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def perturbed(kind: str) -> T5Model:
    """A model whose norms differ from their first values."""
    model = T5Model(T5Config(**(SMALL | KINDS[kind])), ROWS)
    init_parameters(model, 5)
    return perturb(model, seed=6, scale=0.1).eval()


def theirs(model: T5Model) -> Any:
    """The model of transformers with the same weights."""
    document = model_document(model.config, ROWS, "float32")
    config = transformers.AutoConfig.for_model(**document)
    reference = transformers.T5ForConditionalGeneration(config).eval()
    if model.config.untie_embeddings_and_output_weights:  # from_pretrained finds them to differ
        reference.lm_head.weight = nn.Parameter(torch.empty_like(reference.lm_head.weight))
    converted = {t.name: t.convert(model.state_dict()[t.source]) for t in targets(model.config)}
    missing, unexpected = reference.load_state_dict(converted, strict=False)
    assert not unexpected
    assert all("embed_tokens" in name or name == "lm_head.weight" for name in missing), missing
    return reference


@each_kind
def test_the_same_logits_and_gradients(kind: str) -> None:
    model = perturbed(kind)
    reference = theirs(model)
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, ROWS, (3, LENGTH), generator=generator)
    decoder_tokens, labels = torch.randint(0, ROWS, (2, 3, DECODER), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([[40], [17], [6]])).long()
    wanted = reference(
        input_ids=tokens, attention_mask=mask, decoder_input_ids=decoder_tokens, labels=labels
    )
    logits = model(tokens, decoder_tokens, mask)
    assert wanted.logits.abs().max() > 0.3
    torch.testing.assert_close(logits, wanted.logits, **SAME_LOGITS)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, wanted.loss)
    loss.backward()
    wanted.loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    for target in targets(model.config):
        grad = model.get_parameter(target.source).grad
        assert grad is not None
        assert grad.abs().max() > 1e-4, target.name
        torch.testing.assert_close(
            target.convert(grad), gradients[target.name], rtol=1e-4, atol=1e-5, msg=target.name
        )


@pytest.mark.slow
@each_kind
def test_a_folder_of_transformers_is_read_and_written(kind: str, tmp_path: Path) -> None:
    model = perturbed(kind)
    theirs(model).save_pretrained(tmp_path / "hf")
    with open_huggingface(str(tmp_path / "hf")) as source:
        assert isinstance(source.config, T5Config)
        assert source.config.num_params(ROWS) == model.config.num_params(ROWS)
        assert source.config.scale_lm_head_input == model.config.scale_lm_head_input
        for key, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{key}"), tensor), key
        folder = tmp_path / "ours"
        write_hf_folder(source, 1, lambda file: store.open_output(str(folder / file), file))
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    tokens, decoder_tokens = torch.arange(LENGTH).view(1, -1), torch.arange(DECODER).view(1, -1)
    wanted = loaded(input_ids=tokens, decoder_input_ids=decoder_tokens).logits
    torch.testing.assert_close(model(tokens, decoder_tokens), wanted, **SAME_LOGITS)


def test_files_of_google_with_copies_and_unused_tensors_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = perturbed("t5")
    theirs(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(
        16, 4
    )
    for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[copy] = tensors["shared.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    with open_huggingface(str(tmp_path)) as source:
        for key, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{key}"), tensor), key
    tensors["lm_head.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lm_head\.weight differs from shared\.weight"):
        open_huggingface(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": None}, "--softmax-scale other than 1"),
        ({"position_embedding_type": "learned_absolute"}, "learned_absolute .must be relative"),
        ({"lm_head_bias": True}, "--lm-head-bias"),
        ({"scale_lm_head_input": False}, "tied weights without --scale-lm-head-input"),
        ({"relu": False}, "an activation other than --relu, --geglu and --swiglu"),
    ],
)
def test_a_model_that_no_class_computes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(T5Config(**(SMALL | KINDS["t5"] | changes)))
