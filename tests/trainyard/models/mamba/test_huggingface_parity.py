"""Logits and gradients against transformers' Mamba-2 and Nemotron-H, and their folders both
ways."""

from __future__ import annotations

import json
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
from trainyard.errors import ArtifactError, ConfigError
from trainyard.inference.static import generate
from trainyard.models.init import init_parameters
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.model import MambaModel

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROWS, LENGTH = 96, 37
SAME_LOGITS = {"rtol": 1e-4, "atol": 1e-5}
SMALL: dict[str, Any] = {
    "num_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "mamba_state_dim": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 16,
    "make_vocab_size_divisible_by": ROWS,
    "init_method_std": 0.1,
}
NEMOTRON = {
    "hybrid_layer_pattern": "M-M*-",
    "squared_relu": True,
    "untie_embeddings_and_output_weights": True,
    "kv_channels": 12,
    "ffn_hidden_size": 40,
    "mamba_num_heads": 6,
}
KINDS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "mamba2, untied, limits": {
        "untie_embeddings_and_output_weights": True,
        "fp32_residual_connection": True,
        "mamba_dt_min": 0.01,
        "mamba_dt_max": 0.5,
    },
    "nemotron": NEMOTRON,
    "nemotron, grouped": {
        **NEMOTRON,
        "group_query_attention": True,
        "num_query_groups": 2,
        "mamba_dt_min": 0.001,
    },
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def perturbed(kind: str) -> MambaModel:
    """A model whose norms and biases differ from their first values."""
    model = MambaModel(MambaConfig(**(SMALL | KINDS[kind])), ROWS)
    init_parameters(model, 5)
    return perturb(model, seed=6, scale=0.1).eval()


def theirs(model: MambaModel) -> Any:
    """The model of transformers with the same weights."""
    document = model_document(model.config, ROWS, "float32")
    limit = document.get("time_step_limit")
    if limit is not None and isinstance(limit[1], dict):
        document["time_step_limit"] = [limit[0], float("inf")]
    config = transformers.AutoConfig.for_model(**document)
    reference = getattr(transformers, architecture(model.config))(config).eval()
    own = "model." if "Nemotron" in architecture(model.config) else "backbone."
    converted = {
        t.name.replace("backbone.", own): t.convert(model.state_dict()[t.source])
        for t in targets(model.config)
    }
    missing, unexpected = reference.load_state_dict(converted, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    return reference


@each_kind
def test_the_same_logits_and_gradients(kind: str) -> None:
    model = perturbed(kind)
    reference = theirs(model)
    tokens = torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(8))
    wanted = reference(input_ids=tokens, labels=tokens)
    logits = model(tokens)
    assert wanted.logits.abs().max() > 0.3
    torch.testing.assert_close(logits, wanted.logits, **SAME_LOGITS)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted.loss)
    loss.backward()
    wanted.loss.backward()
    gradients = {n.replace("model.", "backbone."): p.grad for n, p in reference.named_parameters()}
    for target in targets(model.config):
        grad = model.get_parameter(target.source).grad
        assert grad is not None
        assert grad.abs().max() > 1e-5, target.name
        torch.testing.assert_close(
            target.convert(grad), gradients[target.name], rtol=1e-3, atol=1e-5, msg=target.name
        )


@each_kind
def test_greedy_texts_are_those_of_transformers(kind: str) -> None:
    model = perturbed(kind)
    reference = theirs(model)
    reference.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(9)
    # `generate` takes a 0 for padding.
    prompts = [torch.randint(1, ROWS, (n,), generator=generator).tolist() for n in (19, 4, 1)]
    for prompt, output in zip(prompts, generate(model, prompts, 12).outputs, strict=True):
        wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert [*prompt, *output] == wanted[0].tolist()
        assert len(set(output)) > 2, "a text that says something"


@each_kind
def test_a_folder_of_transformers_is_read_and_written(kind: str, tmp_path: Path) -> None:
    model = perturbed(kind)
    theirs(model).save_pretrained(tmp_path / "hf")
    with open_huggingface(str(tmp_path / "hf")) as source:
        config = source.config
        assert isinstance(config, MambaConfig)
        assert config.layer_kinds == model.config.layer_kinds
        kept = ["inner_size", "mamba_dt_min", "mamba_dt_max", "fp32_residual_connection"]
        if kind.startswith("nemotron"):
            kept += ["activation", "query_groups", "head_dim", "ffn_size"]
        for name in kept:
            assert getattr(config, name) == getattr(model.config, name), name
        for key, tensor in model.state_dict().items():
            assert torch.equal(source.read(f"model.{key}"), tensor), key
        folder = tmp_path / "ours"
        write_hf_folder(source, 1, lambda file: store.open_output(str(folder / file), file))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(LENGTH).view(1, -1)
    torch.testing.assert_close(model(tokens), loaded(input_ids=tokens).logits, **SAME_LOGITS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_embedding_type": "rope"}, "--position-embedding-type rope"),
        ({"normalization": "LayerNorm"}, "must be RMSNorm"),
        ({**NEMOTRON, "qk_layernorm": True}, "NemotronHForCausalLM: --qk-layernorm"),
        ({**NEMOTRON, "swiglu": True, "squared_relu": False}, "an activation other than"),
        ({**NEMOTRON, "mamba_dt_max": 1.0}, "--mamba-dt-max"),
    ],
)
def test_a_model_that_no_class_computes_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture(MambaConfig(**SMALL | options))


def edited(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    document = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    return str(folder)


def test_configs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    theirs(perturbed("nemotron")).save_pretrained(tmp_path)
    listed = json.loads((tmp_path / "config.json").read_text())["layers_block_type"]
    for fields, error, message in (
        ({"layers_block_type": ["eels"]}, ArtifactError, "wanted a list of linear_attention"),
        ({"layers_block_type": ["moe"] * 5}, ConfigError, "have experts"),
        ({"layers_block_type": listed[:4], "num_hidden_layers": 5}, ArtifactError, "layers are 4"),
        ({"layers_block_type": None}, ArtifactError, "neither hybrid_override_pattern"),
        ({"layers_block_type": listed, "use_conv_bias": False}, ConfigError, "use_conv_bias"),
    ):
        with pytest.raises(error, match=message):
            open_huggingface(edited(tmp_path, **fields))


def test_older_files_with_a_pattern_and_an_unbounded_step_are_read(tmp_path: Path) -> None:
    model = perturbed("nemotron")
    theirs(model).save_pretrained(tmp_path / "n")
    older = edited(tmp_path / "n", layers_block_type=None, hybrid_override_pattern="M-M*-")
    with open_huggingface(older) as source:
        assert source.config.layer_kinds == "M-M*-"  # type: ignore[attr-defined]
    theirs(perturbed("mamba2")).save_pretrained(tmp_path / "m")
    older = edited(tmp_path / "m", time_step_limit=[0.0, float("inf")])
    assert "Infinity]" in (tmp_path / "m/config.json").read_text().replace("\n", "")
    with open_huggingface(older) as source:
        assert source.config.mamba_dt_max is None  # type: ignore[attr-defined]
    edited(tmp_path / "m", layer_norm_epsilon=float("inf"))
    with pytest.raises(ArtifactError, match="layer_norm_epsilon is"):
        open_huggingface(older)
