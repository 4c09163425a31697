"""Logits and gradients against transformers' MegatronBert and Bert, and their folders both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainyard.models.perturbed import perturb
from trainyard.artifacts import store
from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.config import model_document
from trainyard.conversion.huggingface.folder import write_hf_folder
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.errors import ConfigError
from trainyard.models.bert.config import BertConfig
from trainyard.models.bert.model import BertModel
from trainyard.models.init import init_parameters

transformers = pytest.importorskip("transformers")

ROWS = 96
SAME_LOGITS = {"rtol": 1e-4, "atol": 1e-5}
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 24,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_gelu_fusion": False,
    "make_vocab_size_divisible_by": ROWS,
}
KINDS: dict[str, dict[str, Any]] = {
    "MegatronBertForPreTraining": {},
    "MegatronBertForMaskedLM": {"bert_binary_head": False, "num_tokentypes": 2},
    "BertForPreTraining": {"post_layernorm": True, "norm_epsilon": 1e-12},
    "BertForMaskedLM": {
        "post_layernorm": True,
        "bert_binary_head": False,
        "num_tokentypes": 2,
        "bias_gelu_fusion": True,
        "openai_gelu": True,
    },
}


def perturbed(name: str) -> BertModel:
    """A model whose biases and norms differ from their first values."""
    model = BertModel(BertConfig(**(SMALL | KINDS[name])), ROWS)
    init_parameters(model, 5)
    return perturb(model, seed=6, scale=0.05).eval()


def theirs(model: BertModel) -> Any:
    """The model of transformers with the same weights."""
    document = model_document(model.config, ROWS, "float32")
    config = transformers.AutoConfig.for_model(**document)
    made = getattr(transformers, document["architectures"][0])
    config._attn_implementation = "eager"
    reference = made(config).eval()
    state = model.state_dict()
    converted = {t.name: t.convert(state[t.source]) for t in targets(model.config)}
    missing, unexpected = reference.load_state_dict(converted, strict=False)
    assert not unexpected
    assert all("decoder" in name or "position_ids" in name for name in missing), missing
    reference.tie_weights()
    return reference


@pytest.mark.parametrize("name", KINDS)
def test_the_same_logits_and_gradients(name: str) -> None:
    model = perturbed(name)
    assert architecture(model.config) == name
    reference = theirs(model)
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, ROWS, (3, 24), generator=generator)
    types = (torch.arange(24) > 9).long().expand(3, -1)
    mask = (torch.arange(24) < torch.tensor([[24], [17], [6]])).long()
    wanted = reference(input_ids=tokens, attention_mask=mask, token_type_ids=types)
    words, order = model(tokens, mask, types)
    logits = wanted.prediction_logits if order is not None else wanted.logits
    real = mask.bool()
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(words[real], logits[real], **SAME_LOGITS)
    ours = functional.cross_entropy(words[real], tokens[real])
    expected = functional.cross_entropy(logits[real], tokens[real])
    if order is not None:
        torch.testing.assert_close(order, wanted.seq_relationship_logits, **SAME_LOGITS)
        swapped = torch.tensor([0, 1, 1])
        ours = ours + functional.cross_entropy(order, swapped)
        expected = expected + functional.cross_entropy(wanted.seq_relationship_logits, swapped)
    ours.backward()
    expected.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    for target in targets(model.config):
        grad = model.get_parameter(target.source).grad
        assert grad is not None
        torch.testing.assert_close(
            target.convert(grad), gradients[target.name], rtol=1e-4, atol=1e-5, msg=target.name
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_of_transformers_is_read_and_written(name: str, tmp_path: Path) -> None:
    model = perturbed(name)
    theirs(model).save_pretrained(tmp_path / "hf")
    with open_huggingface(str(tmp_path / "hf")) as source:
        assert isinstance(source.config, BertConfig)
        assert source.config.num_params(ROWS) == model.config.num_params(ROWS)
        for key, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{key}"), tensor), key
        folder = tmp_path / "ours"
        write_hf_folder(source, 1, lambda file: store.open_output(str(folder / file), file))
    loaded = getattr(transformers, name).from_pretrained(folder).eval()
    tokens = torch.arange(24).view(1, 24)
    words = loaded(tokens)
    logits = words.prediction_logits if model.binary_head is not None else words.logits
    torch.testing.assert_close(model(tokens).words, logits, **SAME_LOGITS)


def test_names_of_google_are_read(tmp_path: Path) -> None:
    """Norms as gamma and beta, and a copy of the embedding as the output layer."""
    from safetensors.torch import load_file, save_file

    model = perturbed("BertForPreTraining")
    theirs(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for key, tensor in load_file(file).items():
        for new, before in old.items():
            key = key.replace(new, before)
        renamed[key] = tensor
    embedding = renamed["bert.embeddings.word_embeddings.weight"]
    renamed["cls.predictions.decoder.weight"] = embedding.clone()
    save_file(renamed, file, {"format": "pt"})
    with open_huggingface(str(tmp_path)) as source:
        for key, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{key}"), tensor), key


def test_a_model_that_no_class_computes_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --no-bias-gelu-fusion, or --openai-gelu for both"):
        architecture(BertConfig(**(SMALL | {"bias_gelu_fusion": True})))
    with pytest.raises(ConfigError, match=r"--num-tokentypes 0 \(must be 1 or more\)"):
        architecture(BertConfig(**SMALL, bert_binary_head=False))
