"""Hostile JSON documents of other formats are refused by name, quickly."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainyard.checkpoint.bounds import check_model
from trainyard.conversion import documents
from trainyard.conversion.documents import read_document
from trainyard.conversion.huggingface.read import open_huggingface, weight_map
from trainyard.conversion.meta.read import open_meta
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.config_checks import MAX_LAYERS
from trainyard.models.gpt.config import GPTConfig

pytestmark = pytest.mark.timeout(20)  # a reader that builds what it reads runs for minutes

H, F, ROWS = 8, 16, 12

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": ROWS,
    "tie_word_embeddings": True,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}

SHAPES = {
    "embed_tokens": (ROWS, H),
    "norm": (H,),
    "layers.0.input_layernorm": (H,),
    "layers.0.post_attention_layernorm": (H,),
    **{f"layers.0.self_attn.{part}_proj": (H, H) for part in "qkvo"},
    "layers.0.mlp.gate_proj": (F, H),
    "layers.0.mlp.up_proj": (F, H),
    "layers.0.mlp.down_proj": (H, F),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound Llama."""
    tensors = {f"model.{name}.weight": torch.ones(shape) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_what_is_sound_is_read(folder: Path) -> None:
    with open_huggingface(str(folder)) as source:
        assert {spec.shape for spec in source.specs.values()} >= {(ROWS, H), (2 * F, H)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        ('{"a":' * 60 + "1" + "}" * 60, "nested too deeply"),
        ('{"num_hidden_layers": ' + "9" * 10_000 + "}", "not a JSON document"),
        ('{"num_hidden_layers": ' + "9" * 30 + "}", "takes more than 64 bits"),
        ('{"a": [[-' + "9" * 30 + "]]}", "takes more than 64 bits"),
        ('{"rms_norm_eps": NaN}', "NaN is not a number of JSON"),
        ('{"rms_norm_eps": 1e999}', "is not finite"),
        ('{"hidden_size": 8, "hidden_size": 16}', "'hidden_size' is given twice"),
        ("\udcff", "not a JSON document"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_hostile_document_is_refused(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError, match=f"{name}: .*{words}"):
        open_huggingface(str(folder))


def test_a_document_of_absurd_size_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 1000)
    (folder / "config.json").write_text(json.dumps(LLAMA) + " " * 1000)
    with pytest.raises(ArtifactError, match=r"config\.json: has \d+ bytes; .* 1000 at most"):
        open_huggingface(str(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, f"says 1000000000 layers; {MAX_LAYERS} are read at most"),
        ({"num_hidden_layers": 4000}, "says 4000 layers, and there are 11 tensors"),
        ({"num_hidden_layers": -1}, "--num-layers must be above 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, wanted int"),
        (
            {"hidden_size": 2**60},
            "--hidden-size must be at most 2147483647, got 1152921504606846976",
        ),
        ({"intermediate_size": 2**62}, "--ffn-hidden-size must be at most"),
        ({"intermediate_size": 2**70}, "takes more than 64 bits"),
        ({"vocab_size": 2**62}, "describes a model of .* parameters"),
        ({"max_position_embeddings": 2**40}, "must be at most 2147483647, got 1099511627776"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"head_dim": 2**61}, "--kv-channels must be at most"),
        (
            {"hidden_size": 2**30, "head_dim": 2**30},
            "the model has 9.2e.18 parameters, the limit is",
        ),
        ({**QWEN2, "layer_types": 5}, "layer_types is 5, wanted a list"),
        ({**QWEN2, "layer_types": [{}]}, "must be full_attention or sliding_attention"),
        ({**QWEN2, "use_sliding_window": True, "num_hidden_layers": 10**9}, "1000000000 layers"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "positions must be positive",
        ),
        ({"rope_scaling": {"rope_type": ["a"]}}, "rope_type is .*wanted str"),
        ({"architectures": [["x"]]}, "this version reads"),
    ],
)
def test_sizes_and_types_that_no_model_has_are_refused(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises((ArtifactError, ConfigError), match=f"config.json.*{words}"):
        open_huggingface(str(folder))


def test_real_models_are_within_the_bounds() -> None:
    """The largest dense model whose weights are published, and twice the layers of the deepest."""
    llama = {"num_layers": 126, "hidden_size": 16384, "num_attention_heads": 128}
    large = GPTConfig(**llama, seq_length=131072, ffn_hidden_size=53248, swiglu=True)
    check_model(large, 128256, 1000, "there")
    deep = GPTConfig(num_layers=2000, hidden_size=512, num_attention_heads=8, seq_length=4096)
    check_model(deep, 64000, 20000, "there")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"x": 3}}, "3 is not a plain name"),
        ({"weight_map": []}, "has no weight_map"),
        (
            {"weight_map": {"x" * 16_000_000: "a", "y" * 10**6: "a"}},
            "has 17.* bytes; a document may",
        ),
        ([], "has no weight_map"),
    ],
)
def test_a_document_that_is_not_an_index_is_refused(tmp_path: Path, index: Any, words: str) -> None:
    (tmp_path / "x.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=rf"x\.index\.json: {words}"):
        weight_map(str(tmp_path), "x.index.json")


def million(value: object) -> dict[str, object]:
    return {str(number): value for number in range(10**6)}


def write_million_in_index(folder: Path) -> None:
    document = {"weight_map": million("a")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def write_million_in_header(folder: Path) -> None:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(million(entry)).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_million_in_index, r"index\.json: names 1000000 tensors; 250000 are read at most"),
        (write_million_in_header, "model.safetensors: the header has 1000001 tables, .* at most"),
    ],
)
def test_a_million_tensors_are_refused_by_their_number(
    tmp_path: Path, write: Callable[[Path], None], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write(tmp_path)
    with pytest.raises(ArtifactError, match=words):
        open_huggingface(str(tmp_path))


PARAMS: dict[str, Any] = {"dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": -1}


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("meta")
    tensors = {"tok_embeddings.weight": torch.zeros(4, 8), "norm.weight": torch.ones(8)}
    torch.save(tensors, place / "consolidated.00.pth")
    return place


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layers": 10**9}, "says 1000000000 layers"),
        ({"n_layers": 1000}, "says 1000 layers, and there are 2 tensors"),
        ({"n_heads": 0}, "dim 8, n_heads 0"),
        ({"multiple_of": 0}, "multiple_of 0"),
        ({"ffn_dim_multiplier": 1e300}, "ffn_dim_multiplier 1e"),
        ({"hidden_dim": 2**61}, "--ffn-hidden-size must be at most 2147483647"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"norm_eps": "x"}, "norm_eps is 'x', wanted float"),
    ],
)
def test_params_that_no_llama_has_are_refused(
    meta: Path, changes: dict[str, Any], words: str
) -> None:
    (meta / "params.json").write_text(json.dumps({**PARAMS, **changes}))
    with pytest.raises(ArtifactError, match=rf"params\.json.*{words}"):
        open_meta(str(meta))


def test_depth_is_counted_in_tables_and_lists(tmp_path: Path) -> None:
    place = tmp_path / "x.json"
    place.write_text("[" * 50 + "]" * 50)
    assert json.dumps(read_document(str(place))) == place.read_text()


# --- BERT ---------------------------------------------------------------------------------------

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": ROWS,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, f"says 1000000000 layers; {MAX_LAYERS} are read at most"),
        ({"num_hidden_layers": 4000}, "says 4000 layers, and there are 11 tensors"),
        ({"hidden_size": -8}, "--hidden-size must be above 0"),
        ({"intermediate_size": 2**62}, "--ffn-hidden-size must be at most"),
        ({"vocab_size": 2**62}, "describes a model of .* parameters"),
        ({"max_position_embeddings": 2**40}, "--seq-length must be at most"),
        ({"max_position_embeddings": -1}, "--seq-length must be above 0"),
        ({"type_vocab_size": 2**40}, "--num-tokentypes must be at most"),
        ({"type_vocab_size": -1}, "--num-tokentypes must be at least 0"),
        ({"num_attention_heads": 3}, "must be divisible by"),
        ({"layer_norm_eps": -1.0}, "--norm-epsilon must be above 0"),
        ({"hidden_dropout_prob": 2.0}, "--hidden-dropout must be in"),
        ({"attention_probs_dropout_prob": [1]}, "wanted float"),
        ({"hidden_act": ["gelu"]}, "wanted str"),
        ({"hidden_act": "os.system"}, "reads only 'gelu' or 'gelu_new'"),
        ({"architectures": [["x"]]}, "architectures is"),
        ({"architectures": ["BertForMaskedLM"] * 2}, "architectures is"),
        ({"architectures": {"a": 1}}, "architectures is"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "does not know auto_map"),
        ({"position_embedding_type": ["a"]}, "reads only 'absolute'"),
        ({"is_decoder": []}, "reads only False"),
        ({"tie_word_embeddings": "yes"}, "reads only True"),
    ],
)
def test_a_bert_that_cannot_be_is_refused(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**BERT, **changes}))
    with pytest.raises((ArtifactError, ConfigError), match=f"config.json.*{words}"):
        open_huggingface(str(folder))


# --- T5 -----------------------------------------------------------------------------------------

T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": H,
    "d_kv": 4,
    "d_ff": F,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "vocab_size": ROWS,
    "feed_forward_proj": "relu",
}


@pytest.mark.few_cases(8)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 10**9}, "says 1000000000 layers"),
        ({"num_decoder_layers": 10**9}, "says 1000000000 layers"),
        ({"num_decoder_layers": 4000}, "layers, and there are 11 tensors"),
        ({"num_decoder_layers": -1}, ""),
        ({"num_decoder_layers": [1]}, "wanted int"),
        ({"num_layers": True}, "wanted int"),
        ({"d_model": -8}, "--hidden-size must be above 0"),
        ({"d_model": 2**60}, "--hidden-size must be at most"),
        ({"d_model": None}, ""),
        ({"d_ff": 2**62}, "--ffn-hidden-size must be at most"),
        ({"d_kv": 2**61}, "--kv-channels must be at most"),
        ({"d_kv": 0}, ""),
        ({"num_heads": 0}, ""),
        ({"vocab_size": 2**62}, "describes a model of .* parameters"),
        ({"n_positions": 2**40}, "must be at most"),
        ({"n_positions": -1}, ""),
        ({"relative_attention_num_buckets": 2**40}, ""),
        ({"relative_attention_num_buckets": 0}, ""),
        ({"relative_attention_num_buckets": 2**31 - 1}, ""),
        ({"relative_attention_max_distance": -1}, ""),
        ({"relative_attention_max_distance": 2**62}, ""),
        ({"layer_norm_epsilon": -1.0}, "--norm-epsilon must be above 0"),
        ({"dropout_rate": 2.0}, "--hidden-dropout must be in"),
        ({"dropout_rate": [1]}, "wanted float"),
        ({"feed_forward_proj": ["relu"]}, "reads only"),
        ({"feed_forward_proj": "os.system"}, "reads only"),
        ({"is_encoder_decoder": []}, "reads only True"),
        ({"scale_decoder_outputs": "yes"}, "wanted bool"),
        ({"tie_word_embeddings": 1}, "wanted bool"),
        ({"architectures": {"a": 1}}, "architectures is"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "does not know auto_map"),
    ],
    ids=str,
)
def test_a_t5_that_cannot_be_is_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    (folder / "config.json").write_text(json.dumps({**T5, **changes}))
    with pytest.raises((ArtifactError, ConfigError), match=f"config.json.*{words}") as caught:
        open_huggingface(str(folder))
    assert " missing:" not in str(caught.value)  # else it was refused for its tensors alone


def test_any_other_t5_is_refused_for_its_tensors(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(T5))
    with pytest.raises(ArtifactError, match="26 missing:"):
        open_huggingface(str(folder))
