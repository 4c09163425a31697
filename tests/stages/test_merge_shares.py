"""A merge in shares: made by any ranks in any order, joined to the bytes of one run."""

from __future__ import annotations

import errno
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.merge import shares as merge_shares
from stages.merge.config import MergeConfig
from stages.merge.shares import share_of
from stages.runtime.cli import stage_main
from stages.tokenize.config import TokenizeConfig
from tests.stages.tokenize_runs import manifest, numbered, write
from trainyard.artifacts import shared_file, store
from trainyard.artifacts.manifest import publish
from trainyard.corpus import merged_blocks, sums
from trainyard.corpus.indexed import IndexedWriter
from trainyard.errors import ConfigError

BLOCK = 1 << 16
ENDINGS = (".bin", ".idx", ".sums", ".docs")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(merge_shares, "SEGMENT_BYTES", 2 * BLOCK)


def put_raw(folder: Path, sizes: tuple[int, ...]) -> Path:
    """Pairs of so many tokens that no manifest lists."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        prefix = str(folder / f"{number:02d}")
        tokens = np.random.default_rng(number).integers(0, 60_000, size, np.uint16)
        with store.open_output(prefix + ".bin") as out, store.open_output(prefix + ".idx") as idx:
            writer = IndexedWriter(out, np.uint16)
            if size:
                writer.add_flat(tokens, [size])
            writer.write_index(idx)
    return folder


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return put_raw(tmp_path / "raw", (1, 50_000, 0, 32_768, 120_001, 3))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Tokenized pairs, with manifests, origins and sums."""
    for name, first in (("a", 0), ("b", 999)):
        text = write(tmp_path / f"text/{name}.jsonl", *numbered(4000, first))
        line = ["--input", str(text), "--output-prefix", str(tmp_path / "corpus" / name)]
        line += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--workers", "1"]
        assert stage_main("tokenize", TokenizeConfig, "stages.tokenize.run", argv=line) == 0
    return tmp_path / "corpus"


def merge(source: Path | str, prefix: str, *more: str) -> int:
    """The command, in this process."""
    line = ["--input", str(source), "--output-prefix", prefix, *more]
    return stage_main("merge", MergeConfig, "stages.merge.run", argv=line)


def contents(prefix: str) -> list[bytes]:
    urls = [prefix + ending for ending in ENDINGS]
    return [store.read_bytes(url) for url in urls if store.exists(url)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", ["raw", "corpus"])
def test_joined_shares_are_the_bytes_of_one_run(
    kind: str, world_size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    whole, joined = str(tmp_path / "whole"), str(tmp_path / "joined")
    assert merge(source, whole) == 0
    size = ("--world-size", str(world_size))
    for rank in random.Random(world_size).sample(range(world_size), world_size):
        assert merge(source, joined, "--rank", str(rank), *size) == 0
    assert not list(tmp_path.glob("joined.bin"))
    made = [manifest(f"{joined}.shares/{r:05d}-of-{world_size:05d}") for r in range(world_size)]
    assert merge(source, joined, *size) == 0
    assert contents(joined) == contents(whole)
    assert len(contents(whole)) == (4 if kind == "corpus" else 3)
    one, other = manifest(whole), manifest(joined)
    assert (one.files, one.output_digest, one.metrics) == (
        *(other.files, other.output_digest, other.metrics),
    )
    assert (other.inputs, other.lineage) == (one.inputs, one.lineage)
    size_bytes = store.info(joined + ".bin").size_bytes
    assert sum(share.metrics["bytes"] for share in made) == size_bytes
    assert not Path(joined + ".shares").exists()
    for again in (("--rank", "0", *size), size, ()):
        assert merge(source, joined, *again) == 0
    assert manifest(joined).run == other.run


@pytest.mark.slow
def test_each_token_is_read_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    real = store.read_range

    def counted(url: str, start: int, end: int, version: str | None = None) -> bytes:
        read[url[-4:]] += end - start
        return real(url, start, end, version)

    monkeypatch.setattr(store, "read_range", counted)
    prefix = str(tmp_path / "out")
    for rank in range(3):
        assert merge(corpus, prefix, "--rank", str(rank), "--world-size", "3") == 0
    size = sum(path.stat().st_size for path in corpus.glob("*.bin"))
    edges = 2 * sums.BLOCK_BYTES  # a block of .sums where two shares meet
    assert size <= read[".bin"] <= size + edges
    seen = read[".bin"]
    assert merge(corpus, prefix, "--world-size", "3") == 0
    assert read[".bin"] == seen, "the join read tokens"


@pytest.mark.slow
def test_pairs_in_an_object_store_are_merged_in_shares(
    corpus: Path, tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    whole, joined = str(tmp_path / "whole"), str(tmp_path / "joined")
    assert merge(corpus, whole) == 0
    assert merge(corpus, f"{s3_url}/parts/all") == 0
    for rank in "01":
        assert merge(f"{s3_url}/parts", joined, "--rank", rank, "--world-size", "2") == 0
    assert merge(f"{s3_url}/parts", joined, "--world-size", "2") == 0
    assert contents(joined)[:3] == contents(whole)[:3]
    assert manifest(joined).output_digest == manifest(whole).output_digest


@pytest.mark.slow
def test_a_killed_share_goes_on_after_its_last_segment(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, written = str(tmp_path / "out"), []
    real = shared_file.OpenRanges.write

    def failing(self: shared_file.OpenRanges, start: int, data: bytes) -> None:
        written.append(start)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, start, data)

    monkeypatch.setattr(merged_blocks, "available_cores", lambda: 1)
    monkeypatch.setattr(shared_file.OpenRanges, "write", failing)
    size = ("--world-size", "1")
    assert merge(raw, prefix, "--rank", "0", *size) == 3
    before = len(written)
    assert merge(raw, prefix, "--rank", "0", *size) == 0
    assert merge(raw, prefix, *size) == 0
    num_blocks = -(-store.info(prefix + ".bin").size_bytes // BLOCK)
    assert sorted(written[before:]) == [BLOCK * n for n in range(2, num_blocks)]
    assert merge(raw, str(tmp_path / "whole")) == 0
    assert contents(prefix) == contents(str(tmp_path / "whole"))


@pytest.mark.slow
def test_a_damaged_source_is_refused_by_the_share_that_reads_it(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus / "b_text_document.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    prefix = str(tmp_path / "out")
    assert merge(corpus, prefix, "--rank", "0", "--world-size", "2") == 0
    assert merge(corpus, prefix, "--rank", "1", "--world-size", "2") == 1
    assert f"{path}: the 65536 bytes from" in capsys.readouterr().err
    url = str(corpus / "b.manifest.json")
    without_sums = [file for file in manifest(corpus / "b").files if file.path[-5:] != ".sums"]
    Path(url).unlink()
    publish(url, replace(manifest(corpus / "a"), files=tuple(without_sums)), None)
    assert merge(corpus, prefix, "--rank", "1", "--world-size", "2") == 1
    assert f"{path}: digest " in capsys.readouterr().err


@pytest.mark.slow
def test_shares_of_a_file_that_is_gone_are_made_again(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, size = str(tmp_path / "out"), ("--world-size", "2")
    for rank in "01":
        assert merge(raw, prefix, "--rank", rank, *size) == 0
    (unfinished,) = [p for p in Path(prefix + ".shares").glob("*.*") if p.stat().st_size > 400_000]
    unfinished.unlink()
    assert merge(raw, prefix, *size) == 1
    assert "the file that the shares wrote is gone; make all" in capsys.readouterr().err
    assert merge(raw, prefix, "--rank", "0", *size, "--force") == 0
    assert merge(raw, prefix, *size) == 1
    assert "its shares were written into 2 files" in capsys.readouterr().err
    assert not Path(prefix + ".bin").exists()
    assert merge(raw, prefix, "--rank", "1", *size, "--force") == 0
    assert merge(raw, prefix, *size) == 0
    assert merge(raw, str(tmp_path / "whole")) == 0
    assert contents(prefix) == contents(str(tmp_path / "whole"))


@pytest.mark.slow
def test_missing_shares_are_named(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, size = str(tmp_path / "out"), ("--world-size", "3")
    assert merge(raw, prefix, "--rank", "1", *size) == 0
    assert merge(raw, prefix, *size) == 1
    assert "of 3 shares, those of rank 0, 2 are not made yet" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.bin"))
    assert merge(raw, prefix) == 0  # alone after all
    assert not Path(prefix + ".shares").exists()


def test_shares_are_whole_units_of_nearly_equal_number() -> None:
    for num_blocks, world_size, unit in [(10, 3, 1), (10, 3, 4), (2, 5, 1), (9, 5, 2), (1, 1, 8)]:
        shares = [share_of(num_blocks, rank, world_size, unit) for rank in range(world_size)]
        assert [block for share in shares for block in share] == list(range(num_blocks))
        assert all(share.start % unit == 0 for share in shares if share)
        sizes = [-(-len(share) // unit) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"rank": 0}, "needs --world-size"),
        ({"rank": 2, "world_size": 2}, "are 0 to 1"),
        ({"world_size": 2, "virtual": True}, "--virtual copies nothing"),
    ],
)
def test_shares_that_cannot_be(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        MergeConfig(**{"input": ("parts",), "output_prefix": "out", **more})
