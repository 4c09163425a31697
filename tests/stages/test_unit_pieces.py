"""Shares of a large input cut its units into pieces, and the join gives the bytes of one run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stages.clean.config import CleanConfig
from stages.collect.config import CollectConfig
from stages.decontaminate.config import DecontaminateConfig
from stages.dedup.config import DedupConfig
from stages.mix.config import MixConfig
from stages.runtime.cli import stage_main
from stages.score.config import ScoreConfig
from tests.stages.clean_runs import TEXT, contents, prose
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.corpus import unit_sizes

SKIP = ["--on-bad-line", "skip"]
STAGES = {
    "clean": (CleanConfig, ["--input", "{}", "--rules", "min_words:limit=20", *SKIP]),
    "collect": (CollectConfig, ["--source", "json", "--input", "{}", *SKIP]),
    "dedup": (DedupConfig, ["--input", "{}", *SKIP]),
    "decontaminate": (
        DecontaminateConfig,
        ["--input", "{}", "--tasks", "t", "--task-data", "{}/../tasks.jsonl", *SKIP],
    ),
    "mix": (
        MixConfig,
        [*("--sources", "a", "b", "--input", "{}/a*", "{}/[b-z]*", "--epochs", "1.5", "1"), *SKIP],
    ),
    "score": (
        ScoreConfig,
        [
            *("--input", "{}", "--classifier", "annotated", "--attribute", "x"),
            *("--keep-fraction", "0.5", *SKIP),
        ],
    ),
}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three units of an input, each of several pieces in shares."""
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 1500)
    monkeypatch.setattr(unit_sizes, "MAX_UNITS", 3)
    monkeypatch.setattr(unit_sizes, "BLOCK_BYTES", 512)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file that falls into units, and smaller ones that are pieces of one. The middle unit has
    only good lines, and one that is longer than two pieces."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [prose(i % 37, 30 + i % 3) if i % 5 else prose(i, 8) for i in range(90)]
    texts[21] += f" {TEXT}"
    texts[28] = prose(99, 700)
    made = [{"text": one, "score": {"x": i % 7 / 7}} for i, one in enumerate(texts)]
    lines = [json.dumps(one).encode() + b"\n" for one in made]
    for at in (7, 8, 77):
        lines.insert(at, b'{"no": "text"}\n')
    lines.insert(65, b"\n" * 2000)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:62]))
    (folder / "b.jsonl").write_bytes(b"".join(lines[62:66]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[66:80])))
    (folder / "d.jsonl").write_bytes(b"\r\n".join(line.strip() for line in lines[80:]))
    (folder / "empty.jsonl").touch()
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 9])
def test_joined_pieces_are_one_run(
    stage: str, world_size: int, corpus: Path, tmp_path: Path
) -> None:
    config, options = STAGES[stage]
    words = [word.format(corpus) for word in options]

    def run(folder: str, *more: str) -> int:
        given = [*words, "--output-dir", str(tmp_path / folder), "--workers", "1", *more]
        return stage_main(stage, config, f"stages.{stage}.run", argv=given)

    size = ("--world-size", str(world_size))
    assert run("whole") == 0
    made = [run("joined", "--rank", str(rank), *size) for rank in range(world_size)]
    assert made == [0] * world_size
    pieces: list[Path] = []
    for rank in range(world_size):
        share = tmp_path / f"joined.shares/{rank:05d}-of-{world_size:05d}"
        pieces += share.glob("*-0*-0*")
    assert len({path.name for path in pieces}) == len(pieces) > 6
    assert run("joined", *size) == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    found = read_manifest(str(tmp_path / "joined" / MANIFEST))
    assert found is not None
    assert max(one.path.count("-") for one in found[0].files) == 1, "no file of a piece"


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.usefixtures("pieces")
def test_pieces_are_joined_in_an_object_store(corpus: Path, tmp_path: Path, s3_url: str) -> None:
    config, options = STAGES["clean"]
    words = [word.format(corpus) for word in options]

    def run(folder: str, *more: str) -> int:
        given = [*words, "--output-dir", folder, "--workers", "1", *more]
        return stage_main("clean", config, "stages.clean.run", argv=given)

    assert run(str(tmp_path / "whole")) == 0
    for more in (["--rank", "0"], ["--rank", "1"], []):
        assert run(f"{s3_url}/joined", *more, "--world-size", "2") == 0
    assert contents(f"{s3_url}/joined") == contents(tmp_path / "whole")
