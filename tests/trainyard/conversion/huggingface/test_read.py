"""A folder that `transformers` saved computes the same here, and comes out again bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.trainyard.checkpoint.samples import model_of_source, random_gpt, save_gpt
from tests.trainyard.conversion.huggingface.hf_models import (
    LLAMA,
    LLAMA3,
    MODELS,
    VOCAB,
    YARN,
    make,
    some_tokens,
)
from tests.trainyard.conversion.torch_save.test_pickles import Payload
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.config import model_document
from trainyard.conversion.huggingface.config_read import read_config
from trainyard.conversion.huggingface.folder import write_hf_folder
from trainyard.conversion.huggingface.from_hf import recipes
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.huggingface.to_hf import targets
from trainyard.conversion.lazy_tensors import AssembledSource
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.source import Source
from trainyard.errors import ArtifactError, ConfigError, TrainyardError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.rope import rotary_frequencies
from trainyard.models.rope_factors import yarn_gain

transformers = pytest.importorskip("transformers")

SAME_LOGITS = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def export(source: Source, folder: Path, num_shards: int = 1) -> None:
    write_hf_folder(source, num_shards, lambda name: store.open_output(str(folder / name), name))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for f in files for name, t in safetensors.torch.load_file(f).items()}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path)
    with open_huggingface(str(tmp_path)) as source:
        ours = model_of_source(source)
        assert source.padded_vocab_size == VOCAB
        assert (source.vocab_size, source.step) == (257, 0)
    tokens = some_tokens()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **SAME_LOGITS)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "qwen2 some windows"])
def test_in_and_out_gives_the_same_files(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "in")
    with open_huggingface(str(tmp_path / "in")) as source:
        export(source, tmp_path / "out")
    before, after = tmp_path / "in", tmp_path / "out"
    file = "model.safetensors"
    assert (before / file).read_bytes() == (after / file).read_bytes()
    generation = json.loads((before / "generation_config.json").read_text())
    assert json.loads((after / "generation_config.json").read_text()) == generation
    with open_huggingface(str(after)) as again, open_huggingface(str(before)) as source:
        assert again.config == source.config
        assert again.tokenizer_files() == source.tokenizer_files()
    config = transformers.AutoConfig.from_pretrained(after)
    assert (config.bos_token_id, config.eos_token_id) == (generation["bos_token_id"], 0)


SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
ROTARY: dict[str, Any] = {
    **SIZES,
    "seq_length": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(**ROTARY, untie_embeddings_and_output_weights=True),
        GPTConfig(**ROTARY, group_query_attention=True, num_query_groups=2, kv_channels=12),
        GPTConfig(**ROTARY, add_qkv_bias=True, rotary_base=1e6),
        GPTConfig(**ROTARY, qk_layernorm=True, ffn_hidden_size=80),
        GPTConfig(**ROTARY, window_size="7,0", attention_dropout=0.0),
        GPTConfig(**SIZES, seq_length=48, squared_relu=True),
    ],
    ids=["llama", "llama grouped", "qwen2", "qwen3", "mistral", "gpt2"],
)
def test_out_and_in_is_the_identity(config: GPTConfig, tmp_path: Path) -> None:
    assert_out_and_in_is_the_identity(config, tmp_path)


def assert_out_and_in_is_the_identity(config: GPTConfig, tmp_path: Path) -> None:
    model = random_gpt(config)
    save_gpt(str(tmp_path / "run"), model)
    with CheckpointSource(open_checkpoint(str(tmp_path / "run"))) as source:
        export(source, tmp_path / "hf", num_shards=3)
    with open_huggingface(str(tmp_path / "hf")) as back:
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        assert back.specs.keys() == state.keys()
        assert all(torch.equal(back.read(name), state[name]) for name in state)
        assert read_again(back.config) == read_again(config)


def read_again(config: GPTConfig) -> dict[str, Any]:
    """What of a configuration decides the logits, whatever way it is written."""
    names = ("head_dim", "ffn_size", "query_groups", "positions", "activation", "window_size")
    same = ("normalization", "norm_epsilon", "rotary_base", "qkv_bias", "qk_layernorm")
    return {name: getattr(config, name) for name in (*names, *same)}


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scalings_survive_a_round_trip(kind: str) -> None:
    rope = {
        "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        "yarn": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5},
        "llama3": LLAMA3,
    }[kind]
    _, config, _ = read_config(document(rope_parameters=rope), "there")
    again = json.loads(json.dumps(model_document(config, VOCAB, "float32")))
    _, back, _ = read_config(again, "there")
    assert abs(again["rope_parameters"].get("attention_factor", 1) - gain(config)) < 1e-15
    assert rotary(back) == pytest.approx(rotary(config), abs=1e-15)


def gain(config: GPTConfig) -> float:
    return yarn_gain(config) if config.position_embedding_type == "yarn" else 1.0


def rotary(config: GPTConfig) -> list[float]:
    return [gain(config), *rotary_frequencies(config, torch.device("cpu")).tolist()]


def test_both_spellings_of_rotary_embedding_are_equivalent() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = document(rope_theta=500000.0, rope_scaling=scaling)
    new, both = document(rope_parameters=LLAMA3), document(rope_parameters=LLAMA3)
    both |= {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    read = [read_config(found, "there")[1] for found in (old, new, both)]
    assert read[0] == read[1] == read[2]
    assert (read[0].use_rope_scaling, read[0].rope_scaling_factor) == (True, 32.0)


def test_llama3_scales_from_the_longest_sequence_by_default() -> None:
    """As in transformers."""
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    config_json = document(rope_parameters=scaling)
    _, config, _ = read_config(config_json, "there")
    theirs = transformers.AutoConfig.for_model(**config_json)
    original = theirs.rope_parameters["original_max_position_embeddings"]
    assert config.rope_scaling_original_max_position_embeddings == original == 64


def document(**changes: Any) -> dict[str, Any]:
    """A config.json of a Llama."""
    return {**LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama", **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"bits": 4}}, r"does not know quantization_config \(\{'bits': 4"),
        ({"logit_scale": 0.5, "residual_multiplier": 2}, "logit_scale .*residual_multiplier"),
        ({"attention_bias": True}, "attention_bias is True, but this version reads only False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', .*'silu' or 'swish'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type dynamic; this"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, r"rope_parameters\.low_freq"),
        ({"rope_parameters": {**YARN, "short_factor": [1]}}, r"rope_parameters\.short_factor"),
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"architectures is \['MixtralForCausalLM'\], .*; this version reads "
            r"LlamaForCausalLM \(model_type llama\), MistralForCausalLM",
        ),
        ({"model_type": "other"}, "model_type is 'other'; this version reads LlamaForC"),
        ({"model_type": "mistral"}, "model_type is 'mistral', .* architectures.* LlamaForCausalLM"),
        ({"model_type": None}, "has no model_type; this version reads .*gpt2"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": ["LlamaForCausalLM", "x"]}, "architectures is .*'x'"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"pruned_heads": {"1": [0]}}, "pruned_heads"),
        ({"auto_map": {"AutoModel": "there.Code"}}, "auto_map"),
    ],
)
def test_fields_that_change_the_model_are_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"there.*{words}"):
        read_config(document(**changes), "there")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32', wanted int"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_key_value_heads": 3}, "cannot be built: --num-attention-heads"),
        ({"rope_parameters": 3}, "rope_parameters is 3, wanted a table"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_theta": 2.0}}, "make .* agree"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_a_document_that_is_no_model_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        read_config(document(**changes), "there")
    with pytest.raises(ArtifactError, match="wanted a table"):
        read_config([changes], "there")


def test_fields_without_effect_on_the_logits_are_ignored() -> None:
    plain = read_config(document(), "there")
    harmless = {"use_cache": False, "torch_dtype": "bfloat16", "logit_scale": None}
    assert read_config(document(**harmless), "there") == plain


# --- files ----------------------------------------------------------------------------------------


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    make("llama", tmp_path / "one")
    make("llama", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    with (
        open_huggingface(str(tmp_path / "one")) as one,
        open_huggingface(str(tmp_path / "many")) as many,
    ):
        assert one.specs == many.specs
        assert all(torch.equal(one.read(name), many.read(name)) for name in one.specs)


def test_half_precision_stays_as_it_is(tmp_path: Path) -> None:
    make("llama", tmp_path)
    halves = {name: t.to(torch.bfloat16) for name, t in weights(tmp_path).items()}
    safetensors.torch.save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    with open_huggingface(str(tmp_path)) as source:
        assert {spec.dtype for spec in source.specs.values()} == {"BF16"}
        export(source, tmp_path / "out")
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def change(folder: Path, **changes: Any) -> None:
    """Tensors of a folder with others in their place; None takes one away."""
    held = {**weights(folder), **{name.replace("__", "."): t for name, t in changes.items()}}
    kept = {name: t.contiguous() for name, t in held.items() if t is not None}
    safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": None}, r"1 missing:\s+model\.norm\.weight"),
        ({"model__norm__bias": torch.zeros(4)}, r"1 unexpected:\s+model\.norm\.bias"),
        ({"model__norm__weight": torch.zeros(4)}, r"model\.norm\.weight is \[4\], wanted \[32\]"),
        (
            {"model__layers__0__self_attn__q_proj__weight": torch.zeros(32, 32).half()},
            "are of types F16, F32",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_configuration_are_listed(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make("llama", tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ArtifactError, match=words):
        open_huggingface(str(tmp_path))


def test_an_output_layer_must_equal_its_tied_embedding(tmp_path: Path) -> None:
    make("llama tied", tmp_path)
    embedding = weights(tmp_path)["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone(), model__rotary_emb__inv_freq=torch.ones(4))
    with open_huggingface(str(tmp_path)) as source:
        assert "model.output_layer.weight" not in source.specs
    change(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ArtifactError, match=r"lm_head\.weight differs from model\.embed"):
        open_huggingface(str(tmp_path))


def test_gpt2_of_the_hub_has_no_prefix_and_buffers(tmp_path: Path) -> None:
    make("gpt2", tmp_path / "in")
    held = {n.removeprefix("transformer."): t for n, t in weights(tmp_path / "in").items()}
    held["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    held["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    make("gpt2", tmp_path / "hub")
    safetensors.torch.save_file(held, tmp_path / "hub/model.safetensors")
    with (
        open_huggingface(str(tmp_path / "in")) as one,
        open_huggingface(str(tmp_path / "hub")) as other,
    ):
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.specs)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for name, words in {
        "../model.safetensors": "not a plain name",
        "model-00002-of-00002.safetensors": "model-00002-of-00002",
    }.items():
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ArtifactError, match=words):
            open_huggingface(str(tmp_path))


def test_a_folder_without_weights_names_the_missing_files(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"has a config\.json but no weights: neither model\.safetens"
    ):
        open_huggingface(str(tmp_path))


def test_old_pickles_are_read_without_being_run(tmp_path: Path) -> None:
    theirs = make("llama tied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")  # with lm_head, as it was then
    with open_huggingface(str(tmp_path)) as source:
        ours = model_of_source(source)
    with torch.no_grad():
        assert torch.equal(
            ours.embedding.word_embeddings.weight,  # type: ignore[union-attr]
            theirs.model.embed_tokens.weight,
        )
    torch.save({"weight": Payload(Path.touch, tmp_path / "taken")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(TrainyardError, match="refused"):
        open_huggingface(str(tmp_path))
    assert not (tmp_path / "taken").exists()


# --- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_each_tensor_comes_back_from_its_parts(kind: str, grouped: bool) -> None:
    options = dict(ROTARY) if kind == "llama" else {**SIZES, "seq_length": 48}
    if grouped and kind == "llama":
        options |= {"group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True}
    config = GPTConfig(**options)
    model = GPTModel(config, 64)
    init_parameters(model, 0)
    ours, name = model.state_dict(), architecture(config)
    theirs = {t.name: t.convert(ours[t.source]) for t in targets(config)}
    for key, recipe in recipes(config, name).items():
        assert torch.equal(recipe.make([theirs[part] for part in recipe.sources]), ours[key]), key


def test_a_source_has_specs_before_it_reads(tmp_path: Path) -> None:
    make("qwen3", tmp_path)
    with open_huggingface(str(tmp_path)) as source:
        assert isinstance(source, AssembledSource)
        for name, spec in source.specs.items():
            tensor = source.read(name)
            assert tuple(tensor.shape) == spec.shape
            assert tensor.is_contiguous()
