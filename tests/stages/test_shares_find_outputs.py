"""A finished output is found by runs with other shares than those that made it, or with none."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.clean.config import CleanConfig
from stages.runtime.cli import stage_main
from stages.runtime.share_digests import AS_SHARES, SHARES_LINEAGE
from tests.stages.array_tasks import make_corpus
from tests.stages.clean_runs import write
from trainyard.artifacts.block_digest import BLOCK_BYTES, MARK
from trainyard.artifacts.manifest import Manifest, read_manifest

pytestmark = pytest.mark.slow


def clean(source: Path, folder: Path, *more: str) -> None:
    words = ["--input", str(source), "--output-dir", str(folder), "--workers", "1", *more]
    words += ["--rules", "min_words:limit=2"]
    assert stage_main("clean", CleanConfig, "stages.clean.run", argv=words) == 0


def fan_out(source: Path, folder: Path, world_size: int) -> None:
    """All shares, and their join."""
    size = ("--world-size", str(world_size))
    for rank in range(world_size):
        clean(source, folder, "--rank", str(rank), *size)
    clean(source, folder, *size)


def manifest(folder: Path) -> Manifest:
    found = read_manifest(str(folder / "manifest.json"))
    assert found is not None
    return found[0]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "in", BLOCK_BYTES + 12345)


@pytest.mark.parametrize("made_in_shares", [False, True])
def test_other_shares_find_what_is_made(made_in_shares: bool, corpus: Path, tmp_path: Path) -> None:
    out, shares = tmp_path / "out", tmp_path / "out.shares"
    if made_in_shares:
        fan_out(corpus, out, 2)
    else:
        clean(corpus, out)
    made = manifest(out)
    assert made.inputs["input"].digest.startswith(MARK) == made_in_shares
    for world_size in (2, 3):
        for rank in range(world_size):
            clean(corpus, out, "--rank", str(rank), "--world-size", str(world_size))
        assert not shares.exists(), "no share makes anything"
        clean(corpus, out, "--world-size", str(world_size))
    clean(corpus, out)
    assert manifest(out) == made


def test_without_shares_the_lineage_of_shares_is_recorded(corpus: Path, tmp_path: Path) -> None:
    clean(corpus, tmp_path / "whole")
    fan_out(corpus, tmp_path / "joined", 2)
    whole, joined = manifest(tmp_path / "whole"), manifest(tmp_path / "joined")
    assert whole.run[AS_SHARES] == joined.run[SHARES_LINEAGE]
    assert whole.output_digest == joined.output_digest


def test_files_of_one_block_and_listed_ones_have_the_digest_of_a_run_without_shares(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "the yard at dawn"}] * 50)
    clean(source, tmp_path / "whole")
    for given in (source, tmp_path / "whole/documents-*.jsonl"):
        clean(given, tmp_path / "again")
        fan_out(given, tmp_path / "joined", 2)
        whole, joined = manifest(tmp_path / "again"), manifest(tmp_path / "joined")
        assert (joined.inputs, joined.lineage) == (whole.inputs, whole.lineage)


def test_shares_make_again_what_has_lost_a_file(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    clean(corpus, out)
    made = manifest(out)
    lost = next(out.glob("documents-*.jsonl"))
    content = lost.read_bytes()
    lost.unlink()
    fan_out(corpus, out, 2)
    assert lost.read_bytes() == content
    assert manifest(out).output_digest == made.output_digest
