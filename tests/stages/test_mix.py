"""The mix stage: shares as asked, an order that nothing but the seed decides, nothing made up."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from stages.mix import run as mix_run
from stages.mix import scatter
from stages.mix.config import MixConfig
from stages.runtime.cli import stage_main
from stages.runtime.up_to_date import decide
from tests.stages.clean_runs import contents, prose, report, rows, write
from tests.stages.directly import run_directly
from trainyard.artifacts import store
from trainyard.artifacts.backends.local import LocalBackend
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import basename
from trainyard.collection.mixture import BINS, bins_of, copies_of, threshold
from trainyard.config import from_dict
from trainyard.corpus import unit_sizes
from trainyard.corpus.pairs import BLOCKS
from trainyard.errors import ArtifactError, ConfigError, DataError


def mix(folder: Path | str, **options: Any) -> dict[str, Any]:
    given = {"output_dir": str(folder), "workers": 1, "shard_size_mb": 0.01, **options}
    return run_directly(MixConfig, mix_run.run, **given)


def source(path: Path, count: int, first: int = 0) -> Path:
    number = range(first, first + count)
    return write(
        path, [{"text": prose(i), "id": f"{path.stem}-{i}", "url": f"u{i}"} for i in number]
    )


def two(tmp_path: Path) -> dict[str, Any]:
    wiki, web = source(tmp_path / "wiki.jsonl", 40), source(tmp_path / "web.jsonl", 160, 1000)
    return {"sources": ["wiki", "web"], "input": [str(wiki), str(web)]}


def ids(folder: Path) -> list[str]:
    return [row["id"] for row in rows(folder, "documents")]


def test_without_proportions_every_document_is_there_once_and_keeps_all_its_keys(
    tmp_path: Path,
) -> None:
    given = two(tmp_path)
    metrics = mix(tmp_path / "out", **given)
    found = rows(tmp_path / "out", "documents")
    assert len(found) == metrics["documents"] == 200
    assert Counter(row["mixed"]["source"] for row in found) == {"wiki": 40, "web": 160}
    for row in found:
        name, number = row["id"].split("-")
        line = Path(tmp_path / row["origin"]["file"]).read_bytes()[row["origin"]["offset"] :]
        assert json.loads(line.split(b"\n")[0]) == {k: row[k] for k in ("text", "id", "url")}
        assert (row["mixed"], row["url"]) == ({"source": name, "epoch": 1}, f"u{number}")
    assert metrics["shards"] > 3
    assert ids(tmp_path / "out") != sorted(ids(tmp_path / "out"))


@pytest.mark.slow
def test_neither_workers_nor_units_nor_pieces_nor_files_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"epochs": [2.5, 0.3], **two(tmp_path)}
    mix(tmp_path / "one", **options)
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 4000)
    monkeypatch.setattr(scatter, "PIECE_BYTES", 1000)
    mix(tmp_path / "many", **options)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    lines = (tmp_path / "web.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.jsonl").write_bytes(b"".join(lines[:7:-1]))
    (tmp_path / "web/b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:8])))
    mix(tmp_path / "other", **{**options, "input": [options["input"][0], f"{tmp_path}/web"]})
    assert ids(tmp_path / "other") == ids(tmp_path / "one")


def test_shares_joined_are_one_run(tmp_path: Path) -> None:
    given = two(tmp_path)

    def run(folder: str, *more: str) -> int:
        words = ["--sources", "wiki", "web", "--input", *given["input"], "--epochs", "2.5", "0.3"]
        words += ["--output-dir", str(tmp_path / folder), "--workers", "1"]
        return stage_main("mix", MixConfig, "stages.mix.run", argv=[*words, *more])

    assert run("whole") == 0
    for rank in (1, 0):
        assert run("joined", "--rank", str(rank), "--world-size", "2") == 0
    assert run("joined", "--world-size", "2") == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


@pytest.fixture
def three_shares(tmp_path: Path) -> MixConfig:
    """The run that joins them."""
    given = two(tmp_path)
    words = ["--sources", "wiki", "web", "--input", *given["input"], "--world-size", "3"]
    words += ["--output-dir", str(tmp_path / "out"), "--workers", "1"]
    for rank in "012":
        share = [*words, "--rank", rank]
        assert stage_main("mix", MixConfig, "stages.mix.run", argv=share) == 0
    return from_dict(MixConfig, {**given, "output_dir": str(tmp_path / "out"), "world_size": 3})


def test_a_join_decides_with_two_reads_of_each_share_however_many_sources(
    three_shares: MixConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, together = Counter[str](), Barrier(3)
    read_version, size_and_version = LocalBackend.read_version, LocalBackend.size_and_version

    def counted(self: LocalBackend, url: str) -> tuple[bytes, str]:
        read[url] += 1
        if basename(url) == BLOCKS:
            together.wait(timeout=10)  # in parallel
        return read_version(self, url)

    def sized(self: LocalBackend, url: str) -> tuple[int, str]:
        read[url] += 1
        return size_and_version(self, url)

    monkeypatch.setattr(LocalBackend, "read_version", counted)
    monkeypatch.setattr(LocalBackend, "size_and_version", sized)
    decide("mix", three_shares, ["stages.mix.run"], force=False)
    for share in three_shares.all_shares():
        assert read[share.manifest_url] == read[share.file_url(BLOCKS)] == 1
    one = replace(three_shares, sources=("all", "all"))
    sources = [read[url] for url in three_shares.input]
    read.clear()
    decide("mix", one, ["stages.mix.run"], force=False)
    assert [read[url] for url in one.input] == sources


def test_shares_of_a_version_that_digested_no_ranges_are_refused_by_their_ranks(
    three_shares: MixConfig,
) -> None:
    shares = three_shares.all_shares()
    for rank in (0, 2):
        url = shares[rank].manifest_url
        found = read_manifest(url)
        assert found is not None
        Path(shares[rank].file_url(BLOCKS)).unlink()
        files = tuple(one for one in found[0].files if one.path != BLOCKS)
        Path(url).write_text(json.dumps(replace(found[0], files=files).to_document()))
    with pytest.raises(ArtifactError, match="those of rank 0, 2 are made of another code; run"):
        decide("mix", three_shares, ["stages.mix.run"], force=False)
    made = store.join(three_shares.output_dir, MANIFEST)
    store.write_bytes(made, store.read_bytes(shares[1].manifest_url))
    decide("mix", three_shares, ["stages.mix.run"], force=False)  # the output needs no share


@pytest.mark.slow
def test_worker_processes_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"weights": [0.5, 0.5], **two(tmp_path)}
    mix(tmp_path / "one", **options)
    mix(tmp_path / "many", **options, workers=2)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_the_size_of_a_shard_does_not_change_the_order(tmp_path: Path) -> None:
    given = two(tmp_path)
    mix(tmp_path / "small", **given)
    mix(tmp_path / "large", **given, shard_size_mb=1.0)
    assert ids(tmp_path / "small") == ids(tmp_path / "large")
    mix(tmp_path / "seed", **given, seed=7)
    assert ids(tmp_path / "seed") != ids(tmp_path / "large")
    assert sorted(ids(tmp_path / "seed")) == sorted(ids(tmp_path / "large"))


def test_epochs_repeat_whole_sources_and_draw_a_part(tmp_path: Path) -> None:
    mix(tmp_path / "out", epochs=[2.5, 0.25], **two(tmp_path))
    found = Counter(ids(tmp_path / "out"))
    wiki = Counter(found[f"wiki-{i}"] for i in range(40))
    web = Counter(found[f"web-{i}"] for i in range(1000, 1160))
    assert wiki.keys() == {2, 3}
    assert abs(wiki[3] - 20) <= 2
    assert web.keys() == {0, 1}
    assert abs(web[1] - 40) <= 3
    epochs = Counter(row["mixed"]["epoch"] for row in rows(tmp_path / "out", "documents"))
    assert epochs == {1: 40 + web[1], 2: 40, 3: wiki[3]}


def test_weights_are_the_shares_and_no_source_is_repeated_more_than_allowed(
    tmp_path: Path,
) -> None:
    given = two(tmp_path)
    metrics = mix(tmp_path / "out", weights=[3, 7], max_epochs=2.0, count="words", **given)
    table = metrics["sources"]
    assert table["wiki"]["epochs"] == 2.0
    assert table["wiki"]["mixed_share"] == pytest.approx(0.3, abs=0.01)
    words = Counter[str]()
    for row in rows(tmp_path / "out", "documents"):
        words[row["mixed"]["source"]] += len(row["text"].split())
    assert words == {name: one["mixed_size"] for name, one in table.items()}
    assert report(tmp_path / "out")["size"] == words.total()
    size = sum(one["size"] for one in table.values())
    with pytest.raises(DataError, match=r"source wiki: .* would repeat it 4.00 times.* 2"):
        mix(tmp_path / "no", weights=[8, 2], size=size, max_epochs=2.0, count="words", **given)


def test_a_temperature_levels_the_shares(tmp_path: Path) -> None:
    table = mix(tmp_path / "out", temperature=2.0, **two(tmp_path))["sources"]
    # 1 : 4 becomes 1 : 2
    assert table["web"]["mixed_share"] == pytest.approx(2 / 3, abs=0.01)
    assert table["wiki"]["epochs"] == 4.0


def test_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    given = {"count": "tokens", "tokenizer_type": "ByteLevelTokenizer", **two(tmp_path)}
    tokens = mix(tmp_path / "out", **given)["sources"]
    size = mix(tmp_path / "bytes", **two(tmp_path))["sources"]
    assert tokens["web"]["mixed_size"] == size["web"]["size"]


def test_bad_lines_are_counted_or_refused(tmp_path: Path) -> None:
    path = source(tmp_path / "a.jsonl", 3)
    with path.open("a") as file:
        file.write("{\n")
    given = {"sources": ["a"], "input": [str(path)]}
    with pytest.raises(DataError, match="--on-bad-line skip leaves such lines out"):
        mix(tmp_path / "out", **given)
    table = mix(tmp_path / "out", **given, on_bad_line="skip")["sources"]
    assert (table["a"]["bad_lines"], table["a"]["mixed_documents"]) == (1, 3)


def test_places_of_one_name_are_one_source(tmp_path: Path) -> None:
    wiki, web = two(tmp_path)["input"]
    books = str(source(tmp_path / "books.jsonl", 30, 2000))
    given = {"sources": ["web", "wiki", "web"], "input": [web, wiki, books], "weights": [1, 1]}
    table = mix(tmp_path / "out", **given)["sources"]
    assert {name: one["documents"] for name, one in table.items()} == {"web": 190, "wiki": 40}
    assert table["wiki"]["mixed_share"] == pytest.approx(0.5, abs=0.01)


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    wiki, web = two(tmp_path)["input"]
    with pytest.raises(ConfigError, match=r"wiki.jsonl twice, for source a and b; give it once"):
        mix(tmp_path / "out", sources=["a", "b"], input=[wiki, f"{tmp_path}/w*.jsonl"])
    with pytest.raises(ConfigError, match=r"web.jsonl twice, for source a; give it once"):
        mix(tmp_path / "out", sources=["a", "a"], input=[web, web])


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    given = two(tmp_path)
    Path(given["input"][1]).write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="source web: it has no text"):
        mix(tmp_path / "out", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ["a"]}, "--sources has 1 names and --input 2 places"),
        ({"sources": ["a", "a"], "weights": [1, 2]}, r"has 2 numbers for 1 sources \(a\)"),
        ({"sources": ["a", "../b"]}, r"--sources \.\./b: a name is of letters"),
        ({"weights": [1, 2], "temperature": 2.0}, "--weights and --temperature both decide"),
        ({"epochs": [1, 2], "size": 9}, "--epochs decides the size"),
        ({"weights": [1, 2, 3]}, "--weights has 3 numbers for 2 sources"),
        ({"weights": [1, 0]}, "--weights must be above 0 and finite, got 0"),
        ({"epochs": [1, float("nan")]}, "epochs must be a finite number"),
        ({"epochs": [1, 1e9]}, "1e.09 epochs are more than 1000"),
        ({"temperature": -1.0}, "--temperature must be above 0"),
        ({"count": "tokens"}, "--count tokens needs --tokenizer-type"),
        ({"tokenizer_type": "ByteLevelTokenizer"}, "--count bytes needs no tokenizer"),
        ({"shard_size_mb": 0.0}, "--shard-size-mb must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"sources": ["a", "b"], "input": ["x", "y"], **options}
    with pytest.raises(ConfigError, match=message):
        mix(tmp_path, **given)


def test_a_part_of_an_epoch_is_as_large_as_asked() -> None:
    hashes = np.random.default_rng(5).integers(0, 1 << 64, 20_000, np.uint64)
    sizes = np.random.default_rng(6).integers(1, 1000, 20_000)
    bins = np.bincount(bins_of(hashes), sizes, BINS).astype(np.int64)
    for part in (0.0, 0.001, 0.3, 0.999):
        chosen = copies_of(hashes, part, threshold(bins, part))
        assert chosen.max() <= 1
        assert (chosen * sizes).sum() / sizes.sum() == pytest.approx(part, abs=1e-3)
