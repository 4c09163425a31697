"""Which token files a database was cut from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.trainyard.retrieval.corpora import ENGLISH, build, write_corpus, write_two
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import InputRecord, Manifest
from trainyard.errors import ConfigError
from trainyard.retrieval.database_sources import find_datasets, prefixes_of_all


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    found = write_two(tmp_path)
    build(tmp_path, found)
    return found


def with_manifest(folder: Path, prefixes: list[str]) -> str:
    """The database with the inputs that its stage records."""
    names = [f"data_0 (weight 0.5, name {Path(prefixes[0]).name})"]
    names += [f"data_{i} (name {Path(p).name})" for i, p in enumerate(prefixes)][1:]
    found = {
        name: InputRecord((p,), resolve(p, (p,)).digest)
        for name, p in zip(names, prefixes, strict=True)
    }
    document = Manifest(stage="retro_db", inputs=found).to_document()
    (folder / "db/manifest.json").write_text(json.dumps(document))
    return str(folder / "db")


def test_token_files_are_known_by_their_contents_under_any_name(
    tmp_path: Path, prefixes: list[str]
) -> None:
    database = with_manifest(tmp_path, prefixes)
    for ending in ("bin", "idx"):
        shutil.copy(f"{prefixes[1]}.{ending}", tmp_path / f"moved.{ending}")
    given = [str(tmp_path / "moved"), write_corpus(tmp_path / "new", ["new"]), prefixes[0]]
    found = find_datasets(database, given)
    assert found == [(0, 1), (2, 0)]
    assert prefixes_of_all(database, given, found) == [prefixes[0], str(tmp_path / "moved")]
    assert prefixes_of_all(database, given, found[:1]) is None


def test_copies_of_a_corpus_are_all_found(tmp_path: Path) -> None:
    twice = [write_corpus(tmp_path / name, ENGLISH) for name in ("a", "b")]
    build(tmp_path, twice)
    assert find_datasets(with_manifest(tmp_path, twice), twice[:1]) == [(0, 0), (0, 1)]


def test_without_a_manifest_name_and_size_decide(tmp_path: Path, prefixes: list[str]) -> None:
    assert find_datasets(str(tmp_path / "db"), prefixes[::-1]) == [(0, 1), (1, 0)]


@pytest.mark.parametrize("listed", [True, False])
def test_other_contents_under_the_name_of_a_dataset_are_refused(
    tmp_path: Path, prefixes: list[str], listed: bool
) -> None:
    database = with_manifest(tmp_path, prefixes) if listed else str(tmp_path / "db")
    changed = ["changed", *ENGLISH[1:]] if listed else ENGLISH[1:]
    other = write_corpus(tmp_path / "other/en", changed)
    with pytest.raises(ConfigError, match=r"other/en is not what .*db was cut from, though"):
        find_datasets(database, [other])
