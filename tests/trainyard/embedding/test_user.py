"""Embedders of other packages, by their entry points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainyard.embedding import user
from trainyard.embedding.installed import GROUP, version_of
from trainyard.embedding.user import load_user_embedder
from trainyard.errors import ConfigError, DataError

PLUG_IN = """
import numpy as np

def lengths(texts):
    return np.array([[len(text), text.count("a"), 1] for text in texts], np.float32)

def doubles(texts):
    return lengths(texts).astype(np.float64)

def flat(texts):
    return lengths(texts)[:, 0]

def growing(texts):
    return np.ones((len(texts), len(texts)), np.float32)

def endless(texts):
    return lengths(texts) / np.float32(0) if "b" in texts else lengths(texts)
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with embedders."""
    (tmp_path / "in_house_embedders.py").write_text(PLUG_IN)
    info = tmp_path / "in_house-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: in-house\nVersion: 1.5\n")
    names = ("lengths", "doubles", "flat", "growing", "endless", "missing")
    points = "\n".join(f"{name} = in_house_embedders:{name}" for name in names)
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_function_of_a_package_embeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user, "TEXTS_AT_ONCE", 2)
    mine = load_user_embedder("lengths")
    assert mine.dimensions == 3
    found = mine.embed(mine.prepare(["a", "", "banana"])[0])
    assert found.tolist() == [[1, 1, 1], [0, 0, 1], [6, 3, 1]]
    assert version_of("lengths") == {"in-house": "1.5"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("doubles", r"gave float64 \(1, 3\) for 1 texts; it must return float32 \(1, dimensions\)"),
        ("flat", r"gave float32 \(1,\) for 1 texts"),
    ],
)
def test_wrong_vectors_are_refused_before_any_work(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_user_embedder(name)


def test_wrong_vectors_are_refused_later() -> None:
    growing = load_user_embedder("growing")
    with pytest.raises(DataError, match=r"\(2, 2\) for 2 texts; it must return float32 \(2, 1\)"):
        growing.embed(["a", "b"])
    endless = load_user_embedder("endless")
    with (
        np.errstate(divide="ignore", invalid="ignore"),
        pytest.raises(DataError, match="--embedder endless: NaN or infinity for the text 'a'"),
    ):
        endless.embed(["a", "b"])


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--embedder other: no installed .* known: .*lengths"):
        load_user_embedder("other")
    with pytest.raises(ConfigError, match="in_house_embedders:missing could not be imported"):
        load_user_embedder("missing")
