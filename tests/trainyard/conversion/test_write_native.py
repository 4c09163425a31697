"""Somebody else's model as a step of ours: the same tensors, and all that a tool needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.conversion.huggingface.hf_models import make, some_tokens
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.model import load_model
from trainyard.checkpoint.plan import Slice, split_large
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.steps import publish_step
from trainyard.conversion.detect import kind_of_names, loader_for
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.loaders import LOADERS
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.source import Source
from trainyard.conversion.tokenizer_files import Carried
from trainyard.conversion.vocabulary import Adjusted
from trainyard.conversion.write_native import LastRead, check_source, write_step_of
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig

pytest.importorskip("transformers")

SAME_LOGITS = {"rtol": 1e-5, "atol": 1e-5}


def into(source: Source, folder: Path, num_shards: int = 1) -> None:
    """A published step of ours, in a folder of its own."""
    opened = []

    def open_file(name: str) -> Any:
        opened.append(store.open_output(str(folder / name), name))
        return opened[-1]

    write_step_of(source, "hf", num_shards, open_file)
    records = tuple(out.record for out in opened)
    publish_step(str(folder), Manifest(stage="test", lineage="abc", files=records), None)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_step_holds_what_the_source_holds(num_shards: int, tmp_path: Path) -> None:
    theirs = make("llama", tmp_path / "hf")
    step = tmp_path / "iter_0000000"
    with open_huggingface(str(tmp_path / "hf")) as source:
        into(source, step, num_shards)
        with CheckpointSource(open_checkpoint(str(tmp_path))) as ours:
            assert ours.specs == source.specs
            assert all(torch.equal(ours.read(name), source.read(name)) for name in ours.specs)
            assert (ours.config, ours.vocab_size) == (source.config, 257)
            assert ours.generation == source.generation != {}
            assert (ours.step, ours.num_updates, ours.checkpoint.state["stays"]) == (0, 0, True)
    assert len(list(step.glob("model-*"))) == num_shards
    loaded = load_model(str(tmp_path))
    tokens = some_tokens()
    with torch.no_grad():
        expected = theirs(tokens).logits[..., :257]  # they do not know of padding
        torch.testing.assert_close(loaded.model(tokens), expected, **SAME_LOGITS)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the yard")) == "the yard"


@pytest.mark.slow
def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    make("gpt2", tmp_path / "hf")
    for name in "ab":
        with open_huggingface(str(tmp_path / "hf")) as source:
            into(source, tmp_path / name)
    a, b = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")}
        for n in "ab"
    )
    assert a == b


def test_a_tensor_in_several_parts_is_read_once(tmp_path: Path) -> None:
    make("llama", tmp_path)
    with open_huggingface(str(tmp_path)) as source:
        name = "model.embedding.word_embeddings.weight"
        spec = source.specs[name]
        whole = Slice(name, spec.dtype, spec.shape, (0, 0), spec.shape)
        parts = split_large(whole, spec.size_bytes // 3)
        reads: list[str] = []
        read = source.read
        source.read = lambda n: reads.append(n) or read(n)  # type: ignore[method-assign,func-returns-value]
        last = LastRead(source)
        assert len(parts) > 2
        assert torch.equal(torch.cat([last.part(part) for part in parts]), read(name))
        assert reads == [name]


class Changed:
    """A source with other tensors than it should have."""

    def __init__(self, source: Source, specs: dict[str, TensorSpec]) -> None:
        self.url, self.config, self.specs = source.url, source.config, specs
        self.padded_vocab_size = source.padded_vocab_size


NORM = "model.decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda specs: specs.pop(NORM), r"1 missing:\s+decoder\.final_layernorm\.weight"),
        (lambda specs: specs.update({"model.more": specs[NORM]}), r"1 unexpected:\s+more"),
        (lambda specs: specs.update({NORM: TensorSpec("F32", (3,))}), r"is \[3\], wanted \[32\]"),
        (
            lambda specs: specs.update({f"optimizer.exp_avg.{NORM[6:]}": TensorSpec("F32", (3,))}),
            r"optimizer\.exp_avg\.decoder.* \[3\] belongs to no weight",
        ),
        (
            lambda specs: specs.update({f"optimizer.third.{NORM[6:]}": specs[NORM]}),
            r"optimizer\.third.* belongs to no weight",
        ),
        (
            lambda specs: specs.update({NORM: TensorSpec("I32", specs[NORM].shape)}),
            "is I32, but weights are floating point",
        ),
    ],
)
def test_a_source_that_is_not_its_model_is_refused(
    change: Callable[[dict[str, TensorSpec]], object], words: str, tmp_path: Path
) -> None:
    make("llama", tmp_path)
    with open_huggingface(str(tmp_path)) as source:
        specs = dict(source.specs)
        check_source(source)
        change(specs)
        with pytest.raises(ArtifactError, match=words):
            check_source(Changed(source, specs))  # type: ignore[arg-type]


# --- the vocabulary -------------------------------------------------------------------------------

EMBEDDING = "embedding.word_embeddings.weight"
SMALL = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8)


@pytest.mark.parametrize(("divisible_by", "tp", "rows"), [(100, 1, 300), (100, 4, 400)])
def test_rows_above_the_tokens_are_cut_or_repeat_the_last(
    divisible_by: int, tp: int, rows: int, tmp_path: Path
) -> None:
    save_gpt(str(tmp_path), random_gpt(SMALL))  # 384 rows for 257 tokens
    with CheckpointSource(open_checkpoint(str(tmp_path))) as source:
        adjusted = Adjusted(source, divisible_by=divisible_by, tensor_parallel_size=tp)
        assert adjusted.padded_vocab_size == adjusted.config.padded_vocab_size(257, tp) == rows
        before, after = source.read(f"model.{EMBEDDING}"), adjusted.read(f"model.{EMBEDDING}")
        assert after.shape == adjusted.specs[f"model.{EMBEDDING}"].shape == (rows, 8)
        assert torch.equal(after[:300], before[:300])
        moment = adjusted.read(f"optimizer.exp_avg.{EMBEDDING}")
        if rows > 384:
            assert torch.equal(after[384:], before[-1:].expand(rows - 384, 8))
            assert not moment[384:].any()
        assert moment[:300].all()
        assert adjusted.specs.keys() == source.specs.keys()
        check_source(adjusted)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    save_gpt(str(tmp_path), random_gpt(SMALL))
    with CheckpointSource(open_checkpoint(str(tmp_path))) as source:
        with pytest.raises(ConfigError, match=r"--true-vocab-size: 385 tokens, .*rows for 384"):
            Adjusted(source, true_vocab_size=385)
        other = Carried({"a": b""}, 400)
        with pytest.raises(ConfigError, match="the tokenizer: 400 tokens"):
            Adjusted(source, tokenizer=other)
        with pytest.raises(ConfigError, match=r"--true-vocab-size 300, but .* 400"):
            Adjusted(source, tokenizer=other, true_vocab_size=300)
        adjusted = Adjusted(source, tokenizer=Carried({"a": b"b"}, 300))
        assert (adjusted.vocab_size, adjusted.padded_vocab_size) == (300, 384)
        assert adjusted.tokenizer_files() == {"a": b"b"}


def test_a_tokenizer_larger_than_the_model_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("tiny vocabulary", tmp_path)
    with open_huggingface(str(tmp_path)) as source:
        assert (source.vocab_size, source.padded_vocab_size) == (200, 200)
        assert source.config.padded_vocab_size(200) == 200
    assert "has 257 tokens, but the model has rows for only 200" in caplog.text


# --- what lies there ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["iter_0000050/index.json", "iter_0000050/manifest.json"], "trainyard"),
        (["index.json", "model-00001-of-00001.safetensors"], "trainyard"),
        (["iter_0000050/model-00001-of-00002.safetensors"], "trainyard"),
        (["config.json", "model.safetensors", "original/params.json"], "hf"),
        (["config.json", "model-00001-of-00002.safetensors"], "hf"),
        (["config.json", "pytorch_model.bin"], "hf"),
        (["config.json", "tokenizer_config.json"], "hf"),
        (["params.json", "consolidated.00.pth", "tokenizer.model"], "meta"),
        (["iter_0000010/mp_rank_00/model_optim_rng.pt"], "megatron"),
        (["release/mp_rank_00_000/model_optim_rng.pt"], "megatron"),
        (["mp_rank_01_001_000/model_optim_rng.pt"], "megatron"),
        (["iter_0000010/mp_rank_00/distrib_optim.pt"], "megatron"),
        (["iter_0000010/__0_0.distcp", "iter_0000010/.metadata"], "torch_dist"),
        (["iter_0000010/index.json", "iter_0000010/mp_rank_00/model_optim_rng.pt"], "trainyard"),
        (["notes.txt"], None),
        (["config.json"], None),
        ([], None),
    ],
)
def test_the_kind_follows_from_the_names(names: list[str], kind: str | None) -> None:
    assert kind_of_names(names) == kind


def test_auto_detects_the_format_and_defaults_to_ours(tmp_path: Path) -> None:
    make("llama", tmp_path / "hf")
    assert loader_for(str(tmp_path / "hf")) == "hf"
    assert loader_for(str(tmp_path / "nothing")) == "trainyard"
    assert loader_for(str(tmp_path / "nothing"), "core") == "core"
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/__0_0.distcp").write_bytes(b"")
    assert loader_for(str(tmp_path / "dist")) == "torch_dist"
    assert loader_for(str(tmp_path / "dist"), "hf") in LOADERS
