"""Encoders of every kind of checkpoint give the same vectors; what is not one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from stages.reshard.config import ReshardConfig
from stages.reshard.run import run as reshard
from tests.stages.directly import run_directly
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.embedding.encoders import CPU, TEXTS, embed, embedder, make
from tests.trainyard.retrieval.corpora import write_vocabulary
from trainyard.embedding.config import EmbeddingConfig
from trainyard.embedding.embedder import BertEmbedder
from trainyard.embedding.encoder import _gelu_tanh, load_encoder
from trainyard.embedding.word_pieces import find_tokenizer
from trainyard.errors import ArtifactError, ConfigError, TrainyardError
from trainyard.models.gpt.config import GPTConfig
from trainyard.tokenizers.config import TokenizerConfig

CONFIG = EmbeddingConfig(retro_bert_max_chunk_length=48)

KINDS: dict[str, dict[str, Any]] = {
    "trainyard": {"saver": "trainyard", "num_shards": 3},
    "core": {"saver": "core", "target_tensor_parallel_size": 2},
    "legacy": {"saver": "legacy", "target_pipeline_parallel_size": 2},
}


def given(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=write_vocabulary(folder)
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_any_kind_gives_the_same_vectors(kind: str, tmp_path: Path) -> None:
    make(tmp_path / "hf", "MegatronBertForPreTraining")
    tokenizer = given(tmp_path)
    run_directly(
        ReshardConfig,
        reshard,
        **{"load_dir": str(tmp_path / "hf"), "save_dir": str(tmp_path / "out"), **KINDS[kind]},
        tokenizer_type=tokenizer.tokenizer_type,
        vocab_file=tokenizer.vocab_file,
    )
    encoder = load_encoder(str(tmp_path / "out"), CPU, CONFIG)
    words = find_tokenizer(encoder, None if kind == "trainyard" else tokenizer, tmp_path)
    found = embed(BertEmbedder(encoder, words, CONFIG, 1), TEXTS)
    wanted = embed(embedder(tmp_path / "hf"), TEXTS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_gelu_of_the_cpu_is_torchs() -> None:
    x = torch.cat([torch.linspace(-9, 9, 999), torch.tensor([-1e4, -0.0, 1e4])])
    wanted = functional.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(_gelu_tanh(x), wanted, rtol=1e-5, atol=1e-6)


def load(folder: Path, **options: Any) -> None:
    load_encoder(str(folder), CPU, EmbeddingConfig(**options))


def test_a_model_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    gpt = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)
    save_gpt(str(tmp_path / "gpt"), random_gpt(gpt))
    with pytest.raises(ConfigError, match="holds a gpt, and this needs an encoder, a bert"):
        load(tmp_path / "gpt")
    (tmp_path / "llama").mkdir()
    document = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "llama/config.json").write_text(json.dumps(document))
    (tmp_path / "llama/model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model_type is 'llama' .* not an encoder that this"):
        load(tmp_path / "llama")


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({}, {}, "--retro-bert-max-chunk-length 256: the encoder .* has 64 positions"),
        ({"num_hidden_layers": 3}, {}, r"16 missing:\s+bert.encoder.layer.2"),
        ({"num_hidden_layers": 1}, {}, r"16 unexpected:\s+encoder.layer.1"),
        ({"intermediate_size": 40}, {}, "of another shape"),
        ({"is_decoder": True}, {}, "is_decoder is True"),
        ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type is"),
        ({"architectures": ["BertLMHeadModel"]}, {}, "not an encoder that this version reads"),
    ],
)
def test_a_folder_that_ours_does_not_compute_is_refused(
    changed: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(TrainyardError, match=words):
        load(tmp_path, **options)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = make(tmp_path)
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"NaN or infinity in encoder.layers.1.mlp.linear_fc2"):
        load(tmp_path, retro_bert_max_chunk_length=48)


# --- the tokenizer ----------------------------------------------------------------------------


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "few", vocab_size=50)
    make(tmp_path / "many", vocab_size=2000)
    for name, rows in (("few", "50"), ("many", "2,000")):
        encoder = load_encoder(str(tmp_path / name), CPU, CONFIG)
        with pytest.raises(ConfigError, match=rf"has 59 tokens, and the encoder .* {rows}; give"):
            find_tokenizer(encoder, None, tmp_path)


def test_a_library_file_alone_will_do(tmp_path: Path) -> None:
    """tokenizer.json instead of vocab.txt, as newer folders have it."""
    import transformers

    make(tmp_path / "old")
    make(tmp_path / "new")
    (tmp_path / "new/vocab.txt").unlink()
    words = transformers.BertTokenizerFast(str(tmp_path / "old/vocab.txt"), do_lower_case=True)
    words.save_pretrained(tmp_path / "new")
    (tmp_path / "new/vocab.txt").unlink(missing_ok=True)
    texts = [*TEXTS, "The YARD"]
    (tmp_path / "scratch").mkdir()
    encoder = load_encoder(str(tmp_path / "new"), CPU, CONFIG)
    tokenizer = find_tokenizer(encoder, None, tmp_path / "scratch")
    found = embed(BertEmbedder(encoder, tokenizer, CONFIG, 1), texts)
    np.testing.assert_array_equal(found, embed(embedder(tmp_path / "old"), texts))


@pytest.mark.parametrize(
    ("file", "document", "words"),
    [
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "tokenizer.json is 'Unigram', not Word"),
        ("tokenizer_config.json", {"strip_accents": False}, "strip_accents is False in its token"),
        (None, None, "has neither vocab.txt nor tokenizer.json; give --retro-bert-vocab-file"),
    ],
)
def test_a_tokenizer_that_is_not_berts_is_refused(
    file: str | None, document: Any, words: str, tmp_path: Path
) -> None:
    make(tmp_path)
    if file != "tokenizer_config.json":
        (tmp_path / "vocab.txt").unlink()
    if file is not None:
        (tmp_path / file).write_text(json.dumps(document))
    encoder = load_encoder(str(tmp_path), CPU, CONFIG)
    with pytest.raises(ConfigError, match=words):
        find_tokenizer(encoder, None, tmp_path)


def test_the_case_is_that_of_the_folder(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    encoder = load_encoder(str(tmp_path), CPU, CONFIG)
    tokenizer = find_tokenizer(encoder, None, tmp_path)
    assert tokenizer.encode("Ab") == [tokenizer.unk]
    assert tokenizer.vocab_size == 59, "no sentinels, which the encoder has no rows for"
