"""Indices built ahead: what pretraining finds, and what it takes to be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stages.index.config import IndexConfig
from stages.index.run import run
from tests.stages.directly import run_directly, run_process
from tests.stages.pretrain_runs import OPTIONS as PRETRAIN
from tests.stages.pretrain_runs import Pretrain, arguments, flags, manifest, settled_pair
from trainyard.config import from_dict, leaves
from trainyard.corpus.indexed import IndexedDataset
from trainyard.datasets import vocabulary
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig
from trainyard.datasets.index_cache import IndexCache
from trainyard.datasets.sample_format import SampleFormat
from trainyard.errors import ConfigError, DataError
from trainyard.testing.kill import Zygote

pytestmark = pytest.mark.slow

SHARED = [name for name, _, _ in leaves(IndexConfig) if name in PRETRAIN]
OPTIONS = {name: PRETRAIN[name] for name in SHARED}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    for name, first in (("a", 0), ("b", 500)):
        settled_pair(folder / name, [60] * 40, first)
    return str(folder)


def blend(tokens: str) -> list[str]:
    return ["0.3", f"{tokens}/a", "0.7", f"{tokens}/b"]


def index(zygote: Zygote, tokens: str, output: Path, **options: Any) -> str:
    given = {"data_path": blend(tokens), **OPTIONS, **options, "output_dir": output}
    status, _, log = zygote.run("stages.index", flags(given))
    assert status == 0, log
    return log


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if path.name != "manifest.json"]


@pytest.fixture(scope="module")
def indices(zygote: Zygote, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indices") / "out"
    index(zygote, tokens, folder)
    return folder


@pytest.fixture
def train(pretrain: Pretrain, tokens: str) -> Callable[..., str]:
    return partial(pretrain, data_path=blend(tokens))


def test_output_is_indices_without_the_paths_of_tokens(indices: Path, tokens: str) -> None:
    listed = {file.path for file in manifest(indices).files}
    found = {str(p.relative_to(indices)) for p in indices.rglob("*") if p.is_file()}
    assert found == listed | {"manifest.json"}
    documents = entries(indices)
    assert len(documents) == manifest(indices).metrics["indices"] == 6
    assert not any(tokens in path.read_text() for path in documents)
    assert manifest(indices).metrics["train_samples"] >= 32


def test_training_uses_indices(train: Callable[..., str], indices: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in indices.rglob("*")}
    log = train(tmp_path / "with", data_cache_path=indices)
    assert "saved index" not in log
    assert {path: path.stat().st_mtime_ns for path in indices.rglob("*")} == before
    train(tmp_path / "without")
    log = train(tmp_path / "own", data_cache_path=tmp_path / "cache")
    assert log.count("saved index") == 6
    digests = {manifest(tmp_path / name).output_digest for name in ("with", "without", "own")}
    assert len(digests) == 1
    kept = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    ahead = {path.name: path.read_bytes() for path in indices.iterdir()}
    assert kept == {name: ahead[name] for name in ahead if name != "manifest.json"}


def test_cache_path_is_no_change(train: Callable[..., str], indices: Path, tmp_path: Path) -> None:
    short = {"train_iters": 2, "eval_iters": 0}
    train(tmp_path / "run", **short)
    assert "nothing to do" in train(tmp_path / "run", data_cache_path=indices, **short)


def test_unwritable_cache_is_a_warning(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    short = {"train_iters": 2, "eval_iters": 0}
    log = train(tmp_path / "run", data_cache_path=tmp_path / "file", **short)
    assert "is not saved" in log


def test_every_number_that_decides_is_asked_for_by_pretrains_name() -> None:
    shared = {"seq_length", "global_batch_size", "train_iters", "eval_interval", "eval_iters"}
    assert shared | {"split"} <= set(SHARED)


def test_rerun_replaces_indices(zygote: Zygote, tokens: str, indices: Path, tmp_path: Path) -> None:
    assert "nothing to do" in index(zygote, tokens, indices)
    index(zygote, tokens, tmp_path / "other", seed=5)
    before = {path.name for path in entries(tmp_path / "other")}
    blends = before & {path.name for path in entries(indices)}
    assert len(blends) == 2
    assert "option --seed changed" in index(zygote, tokens, tmp_path / "other", seed=6)
    after = {path.name for path in entries(tmp_path / "other")}
    assert len(after) == 6
    assert after & before == blends  # the others are gone


def test_threads_build_the_same(zygote: Zygote, tokens: str, tmp_path: Path) -> None:
    six = [word for k in range(6) for word in ("1", f"{tokens}/{'ab'[k % 2]}")]
    index(zygote, tokens, tmp_path / "out", data_path=six, num_dataset_builder_threads=4)
    index(zygote, tokens, tmp_path / "one", data_path=six)
    assert manifest(tmp_path / "out").output_digest == manifest(tmp_path / "one").output_digest


def test_the_cache_option_of_pretrain_is_refused(tokens: str) -> None:
    options = {**OPTIONS, "data_path": [f"{tokens}/a"], "output_dir": "x"}
    with pytest.raises(ConfigError, match="--data-cache-path is where pretrain looks"):
        from_dict(IndexConfig, {**options, "data_cache_path": "y"})
    with pytest.raises(ConfigError, match="--seq-length"):
        from_dict(IndexConfig, {**options, "seq_length": 0})
    with pytest.raises(ConfigError, match="--train-iters"):
        from_dict(IndexConfig, {**options, "train_iters": 0})


def test_a_split_without_documents_is_named(tokens: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "data_path": [f"{tokens}/a"], "split": "1,0,0"}
    with pytest.raises(ConfigError, match="the valid split"):
        run_directly(IndexConfig, run, **options, output_dir=str(tmp_path / "out"))


@pytest.mark.distributed
def test_of_two_ranks_one_builds_and_the_other_finds(tokens: str, tmp_path: Path) -> None:
    options = {"data_path": blend(tokens), "data_cache_path": tmp_path / "cache"}
    words = arguments("", tmp_path / "run", **options, nproc_per_node=2, train_iters=2)
    assert run_process("stages.pretrain", *words, seconds=200).count("saved index") == 6
    assert len(entries(tmp_path / "cache")) == 6


def test_the_largest_id_of_a_large_file_is_looked_for_ahead(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WHOLE_TOKENS", 100), ("BLOCK_TOKENS", 2)):
        monkeypatch.setattr(vocabulary, name, value)
    folder, prefix = str(tmp_path / "indices"), f"{tokens}/a"
    data = {"data_path": [prefix], "split": "100,0,0"}
    length = {"seq_length": 16, "global_batch_size": 4, "train_iters": 8, "eval_iters": 0}
    run_directly(IndexConfig, run, **data, **length, output_dir=folder)
    flat = IndexedDataset(prefix).tokens
    assert flat is not None
    top = int(flat.max())
    form = SampleFormat(16, 1234, vocab_size=top, eod=0)
    config, sizes = from_dict(DataConfig, data), (32, 0, 0)
    with pytest.raises(DataError, match=f"token {top} in document 16 at place 39 "):
        build_datasets(config, form, sizes, IndexCache(folder))
    build_datasets(config, replace(form, vocab_size=top + 1), sizes, IndexCache(folder))
    build_datasets(config, form, sizes)  # nowhere that is looked at; its sample will be refused
