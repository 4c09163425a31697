"""The ways of tokenize that leave the plain one, killed anywhere and run again: the same digest.

Each file is just above the size of a unit, so that it is two of them, and kills fall between
finished units too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.artifacts.urls import join
from trainyard.corpus import unit_sizes
from trainyard.testing.kill import Zygote, check_kill_anywhere

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

SHARES = 2
TEXT = "The yard wakes at dawn. Trains of words are shunted. \nNone is lost!"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files, each with bad lines and sentences."""
    root = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": f"{TEXT} {i} " * 40, "title": [f"{i}."]}) for i in range(60)]
    lines[20:20] = ["{", '{"body": 1}']
    blank = " " * (unit_sizes.UNIT_BYTES // 2)  # skipped at no cost
    for name in "abc":
        path = root / f"in/{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*lines, blank, blank, *lines]) + "\n")
        os.utime(path, (1e9, 1e9))  # settled: its digest is remembered
    return root


@pytest.fixture
def arguments(
    corpus: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """The command line of a run that writes to a prefix."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(corpus / "cache"))
    monkeypatch.setenv("NLTK_DATA", str(shared / "data/nltk_data"))

    def build(prefix: str, *more: str) -> list[str]:
        base = ["--input", str(corpus / "in"), "--output-prefix", prefix, "--append-eod"]
        return [*base, "--tokenizer-type", "ByteLevelTokenizer", "--on-bad-line", "skip", *more]

    return build


def no_leftovers(root: Path) -> bool:
    return [path for path in root.rglob("*") if path.name.startswith(".")] == []


SHARE = ("--rank", "1", "--world-size", str(SHARES))
RUNS = {
    "skip": ("1", (), 20),
    "sentences": ("1", ("--split-sentences", "--json-keys", "text", "title"), 8),
    "worker processes": ("2", (), 8),  # the engine of bytes holds the interpreter lock
    "share of a rank": ("1", SHARE, 12),
}
"""Workers, other options, points."""


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_survives_a_kill_anywhere(
    kind: str, arguments: Callable[..., list[str]], zygote: Zygote, tmp_path: Path
) -> None:
    workers, more, points = RUNS[kind]
    ending = f".shares/00001-of-{SHARES:05d}" if more == SHARE else ""
    check_kill_anywhere(
        zygote,
        "stages.tokenize",
        lambda name: arguments(str(tmp_path / name), "--workers", workers, *more),
        lambda name: str(tmp_path / f"{name}{ending}.manifest.json"),
        points,
    )
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize(("kind", "points"), [("file", 14), ("s3", 6)])
def test_joining_the_shares(
    kind: str,
    points: int,
    arguments: Callable[..., list[str]],
    zygote: Zygote,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    root = str(tmp_path) if kind == "file" else str(request.getfixturevalue("s3_url"))
    size = ("--workers", "1", "--world-size", str(SHARES))
    made: set[str] = set()

    def joining(name: str) -> list[str]:
        prefix = join(root, name)
        for rank in range(SHARES) if name not in made else ():
            line = arguments(prefix, *size, "--rank", str(rank))
            status, _, log = zygote.run("stages.tokenize", line)
            assert status == 0, log
        made.add(name)
        return arguments(prefix, *size)

    def manifest(name: str) -> str:
        return join(root, f"{name}.manifest.json")

    check_kill_anywhere(zygote, "stages.tokenize", joining, manifest, points)
    assert no_leftovers(tmp_path)
    if kind == "file":
        assert not list(tmp_path.glob("*.shares")), "the shares outlived the whole"
