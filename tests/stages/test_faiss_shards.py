"""Indices that grow, and indices in shards: both answer as one that was filled at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("faiss")

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_train.config import FaissTrainConfig
from stages.runtime.cli import stage_main
from tests.trainyard.retrieval.embedded import clustered, write_blocks
from trainyard.config import to_dict
from trainyard.errors import ConfigError
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.index_document import IndexDocument
from trainyard.retrieval.shards import open_shards

OLD, NEW = clustered(2400, 8), clustered(900, 8, seed=1)
NEW[:200] = OLD[:200]  # equal distances


def words(**options: Any) -> list[str]:
    found = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, *map(str, values)]
    return found


def train(at: Path, index_str: str) -> None:
    options = {"embeddings": at / "a", "output_dir": at / "empty", "retro_index_str": index_str}
    argv = words(**options)
    assert stage_main("faiss_train", FaissTrainConfig, "stages.faiss_train.run", argv=argv) == 0


def add(index: Path, embeddings: Sequence[Path], into: Path, expect: int = 0, **more: Any) -> None:
    given = {"recall_sample": 60, "retro_query_num_neighbors_save": 5, **more}
    argv = words(index=index, embeddings=list(embeddings), output_dir=into, **given)
    assert stage_main("faiss_add", FaissAddConfig, "stages.faiss_add.run", argv=argv) == expect


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def answers(folder: Path, k: int, nprobe: int) -> list[Any]:
    document = json.loads((folder / "index.json").read_text())
    shards = open_shards(str(folder), IndexDocument.from_document(document, ""), folder)
    queries = np.concatenate((NEW[:150], clustered(50, 8, seed=2)))
    return [part.tolist() for part in shards.search(queries, k, nprobe, 16)]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings a and b, an index trained on a, one filled with a, and one with both."""
    folder = tmp_path_factory.mktemp("faiss")
    write_blocks(folder / "a", OLD, 500)
    write_blocks(folder / "b", NEW, 350)
    train(folder, "IVF16,SQ8")
    add(folder / "empty", [folder / "a"], folder / "old")
    add(folder / "empty", [folder / "a", folder / "b"], folder / "both")
    return folder


# --- growing ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_index_that_grew_is_the_one_that_was_filled_at_once(at: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in (at / "old").iterdir() if path.is_file()}
    add(at / "old", [at / "a", at / "b"], tmp_path / "grown")
    for name in ("added.faissindex", "index.json"):
        assert (tmp_path / "grown" / name).read_bytes() == (at / "both" / name).read_bytes()
    after = {path.name: path.read_bytes() for path in (at / "old").iterdir() if path.is_file()}
    assert after == before, "the old version stays as it is"
    assert answers(at / "old", 5, 4) != answers(tmp_path / "grown", 5, 4)


@pytest.mark.slow
def test_growing_reports_the_drift(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = np.full((1500, 8), 9, np.float32) + 0.01 * clustered(1500, 8, seed=3)
    write_blocks(tmp_path / "strange", strange, 1500)
    add(at / "old", [at / "a", tmp_path / "strange"], tmp_path / "grown")
    drift = manifest(tmp_path / "grown")["metrics"]["drift"]
    index = faiss_index.read(at / "old/added.faissindex")
    sizes = faiss_index.list_sizes(index)
    assert sizes is not None
    even = (sizes**2).sum() * 16 / 2400**2
    assert drift["before"]["list_imbalance"] == pytest.approx(even, abs=1e-4)
    assert drift["before"]["recall"] == manifest(at / "old")["metrics"]["recall"]
    assert drift["after"]["list_imbalance"] > 2 * even, "all new vectors are in some list"
    assert drift["lists_without_new"] >= 12
    grown = faiss_index.list_sizes(faiss_index.read(tmp_path / "grown/added.faissindex"))
    assert grown is not None
    assert drift["before"]["empty_lists"] == (sizes == 0).sum()
    assert drift["after"]["empty_lists"] == (grown == 0).sum()
    assert "train a new index on a sample of everything" in capsys.readouterr().err
    assert "drift" not in manifest(at / "old")["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("embeddings", "more", "message"),
    [
        (["b", "a"], {}, "is not the one that --index"),
        (["b"], {}, "holds 2,400 vectors, and none of --embeddings begins there"),
        (["a", "b"], {"retro_index_add_load_fraction": 0.5}, "cannot take more"),
        (["a", "other"], {}, "of 4 dimensions, and the embeddings before it have 8"),
    ],
)
def test_what_does_not_belong_to_a_filled_index_is_refused(
    at: Path,
    tmp_path: Path,
    embeddings: list[str],
    more: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_blocks(at / "other", clustered(100, 4), 100)
    if embeddings == ["b", "a"]:  # as many vectors, so that only their values tell
        write_blocks(tmp_path / "b", clustered(2400, 8, seed=9), 500)
        add(at / "old", [tmp_path / "b", at / "a"], tmp_path / "grown", expect=2)
    else:
        add(at / "old", [at / name for name in embeddings], tmp_path / "grown", expect=2, **more)
    assert message in capsys.readouterr().err


# --- shards -----------------------------------------------------------------------------------


def in_shares(at: Path, base: str, into: Path, count: int, **more: Any) -> None:
    both = [at / "a", at / "b"]
    for rank in range(count):
        add(at / base, both, into, rank=rank, world_size=count, **more)
    add(at / base, both, into, world_size=count, **more)


@pytest.mark.slow
def test_shares_join_to_the_bytes_of_one_run(at: Path, tmp_path: Path) -> None:
    in_shares(at, "empty", tmp_path / "joined", 3)
    in_shares(at, "old", tmp_path / "grown", 2)
    for folder in ("joined", "grown"):
        for name in ("added.faissindex", "index.json"):
            assert (tmp_path / folder / name).read_bytes() == (at / "both" / name).read_bytes()
        assert not (tmp_path / f"{folder}.shares").exists()


@pytest.mark.slow
@pytest.mark.parametrize("index_str", ["IVF16,SQ8", "Flat", "SQ8"])
def test_shards_answer_as_one_index(index_str: str, tmp_path: Path) -> None:
    write_blocks(tmp_path / "a", OLD, 500)
    write_blocks(tmp_path / "b", NEW, 350)
    train(tmp_path, index_str)
    add(tmp_path / "empty", [tmp_path / "a", tmp_path / "b"], tmp_path / "one")
    in_shares(tmp_path, "empty", tmp_path / "shards", 3, keep_shards=True)
    names = sorted(path.name for path in (tmp_path / "shards").glob("*.faissindex"))
    assert names == [f"added-{i:05d}-of-00003.faissindex" for i in range(3)]
    for k, nprobe in ((1, 1), (10, 4), (300, 16)):
        assert answers(tmp_path / "shards", k, nprobe) == answers(tmp_path / "one", k, nprobe)
    one, shards = (json.loads((tmp_path / n / "index.json").read_text()) for n in ("one", "shards"))
    assert shards == one | {"num_shards": 3}


@pytest.mark.slow
def test_a_share_that_was_changed_is_not_joined(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [at / "a", at / "b"]
    for rank in range(2):
        add(at / "empty", both, tmp_path / "out", rank=rank, world_size=2)
    shares = tmp_path / "out.shares"
    shutil.copy(
        shares / "00000-of-00002/added.faissindex", shares / "00001-of-00002/added.faissindex"
    )
    add(at / "empty", both, tmp_path / "out", expect=1, world_size=2)
    assert "00001-of-00002/added.faissindex" in capsys.readouterr().err
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("of other lists", "wanted 3300, and its lists are not as long"),
        ("twice", "wanted 3300, and its lists are not as long"),
        ("of other codes", "merge: the joined index finds other neighbours of vector"),
    ],
)
def test_a_join_that_went_wrong_is_not_published(
    change: str,
    message: str,
    at: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shares that are right, of which the join takes other vectors, as memory that fails would."""
    both, join = [at / "a", at / "b"], faiss_index.append
    for rank in range(2):
        add(at / "empty", both, tmp_path / "out", rank=rank, world_size=2)

    def append(whole: Any, part: Any) -> None:
        first = whole.ntotal
        vectors = np.concatenate((OLD, NEW))[first : first + part.ntotal]
        part.reset()
        if change == "twice":
            vectors = vectors[[0] * len(vectors)]
        elif change == "of other lists":
            vectors = -vectors
        codes = faiss_index.encode(part, vectors)
        if change == "of other codes":
            codes[:, 1:] ^= 255  # the same lists
        faiss_index.add_codes(part, codes, first)
        join(whole, part)

    monkeypatch.setattr(faiss_index, "append", append)
    add(at / "empty", both, tmp_path / "out", expect=1, world_size=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.slow
def test_missing_shares_are_named(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(at / "empty", [at / "a"], tmp_path / "out", rank=0, world_size=3)
    add(at / "empty", [at / "a"], tmp_path / "out", expect=1, world_size=3)
    assert "of 3 shares, those of rank 1, 2 are not made yet" in capsys.readouterr().err


def test_shares_that_cannot_be_are_refused() -> None:
    given = {"index": "i", "embeddings": ("e",), "output_dir": "o"}
    for more, message in (
        ({"rank": 1}, "--rank 1 needs --world-size"),
        ({"rank": 2, "world_size": 2}, "shares of --world-size 2 are 0 to 1"),
        ({"keep_shards": True}, "--keep-shards needs --world-size"),
        ({"retro_task_validate": 2.0}, "above 0 and at most 1, got 2.0"),
        ({"retro_task_validate": 0.5, "rank": 0, "world_size": 2}, "checks a whole output"),
    ):
        with pytest.raises(ConfigError, match=message):
            FaissAddConfig(**given, **more)  # type: ignore[arg-type]
    assert to_dict(FaissAddConfig(**given))["embeddings"] == ["e"]  # type: ignore[arg-type]


# --- validation -------------------------------------------------------------------------------


@pytest.mark.slow
def test_validation_finds_a_code_that_is_not_of_its_embedding(
    at: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [at / "a", at / "b"]
    add(at / "empty", both, at / "both", retro_task_validate=0.5)
    said = capsys.readouterr().out
    assert "4 of 8 blocks encoded again" in said
    assert "all as in the index" in said
    write_blocks(tmp_path / "a", OLD, 500)
    write_blocks(tmp_path / "b", NEW, 350)
    add(at / "empty", [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    index = faiss_index.read(tmp_path / "out/added.faissindex")
    index.remove_ids(np.array([1234]))
    vectors = np.ones((1, 8), np.float32)
    faiss_index.add_codes(index, faiss_index.encode(index, vectors), 1234)
    with (tmp_path / "out/added.faissindex").open("wb") as file:
        faiss_index.write(index, file)
    folders = [tmp_path / "a", tmp_path / "b"]
    add(at / "empty", folders, tmp_path / "out", expect=1, retro_task_validate=1)
    assert "added.faissindex" in capsys.readouterr().err, "not what the manifest lists"
    listed = manifest(tmp_path / "out")
    (tmp_path / "out/manifest.json").unlink()
    add(at / "empty", folders, tmp_path / "out", expect=1, retro_task_validate=1)
    assert "no finished output to validate" in capsys.readouterr().err
    assert listed["stage"] == "faiss_add"
