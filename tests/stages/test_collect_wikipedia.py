"""The collect stage on dumps: every page is a document or dropped with a reason, the same bytes for
any workers, shares and stores, and blame leads to the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.collect import run as collect_run
from stages.collect import sources
from stages.collect.config import CollectConfig
from stages.runtime.cli import stage_main
from tests.stages.clean_runs import contents, report, rows
from tests.stages.directly import run_directly
from trainyard.artifacts import store
from trainyard.corpus import unit_sizes
from trainyard.errors import ConfigError, DataError
from trainyard.testing import wiki_dump
from trainyard.testing.wiki_dump import Plan, Planted, evaluation_items, write_dump

PLAN = Plan(articles=60, words=60, seed=7, leaked_share=0.1, near_duplicate_share=0.1)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 9000)
    sources.site_of.cache_clear()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    folder = tmp_path_factory.mktemp("dump")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wiki_dump, "PAGES_A_STREAM", 5)
        planted = write_dump(folder / "wiki.xml.bz2", PLAN, folder / "wiki-index.txt.bz2")
    return folder / "wiki.xml.bz2", planted


def collect(source: Path | str, folder: Path | str, **options: Any) -> dict[str, Any]:
    given = {"source": "wikipedia", "input": [str(source)], "output_dir": str(folder)}
    return run_directly(CollectConfig, collect_run.run, **given, workers=1, **options)


def test_every_page_is_kept_or_dropped_with_its_reason(
    dump: tuple[Path, Planted], tmp_path: Path
) -> None:
    path, planted = dump
    index = [str(path.with_name("wiki-index.txt.bz2"))]
    metrics = collect(path, tmp_path / "out", multistream_index=index)
    kept, dropped = (rows(tmp_path / "out", kind) for kind in ("documents", "dropped"))
    assert len(contents(tmp_path / "out")) > 4  # several units
    assert sorted(int(row["id"]) for row in kept + dropped) == list(range(1, planted.pages + 1))
    assert len(kept) == metrics["kept_documents"] == planted.articles
    assert metrics["dropped"] == {
        **dict.fromkeys(("empty", "too_large", "bad_record"), 0),
        "namespace": planted.others,
        "redirect": planted.redirects,
        "disambiguation": planted.disambiguations,
    }
    assert {row["dropped"]["rule"] for row in dropped} == {
        "namespace",
        "redirect",
        "disambiguation",
    }
    assert report(tmp_path / "out")["reasons"]["redirect"]["samples"]


def test_what_was_planted_is_in_the_documents(dump: tuple[Path, Planted], tmp_path: Path) -> None:
    path, planted = dump
    collect(path, tmp_path / "out")
    texts = {row["title"]: row["text"] for row in rows(tmp_path / "out", "documents")}
    items = evaluation_items(PLAN)
    assert planted.leaked
    assert planted.near_duplicates
    for title, item in planted.leaked:
        assert items[item] in texts[title].replace(" \u2013", "")
    for first, second in planted.near_duplicates:
        words = [set(texts[title].split()) for title in (first, second)]
        assert len(words[0] & words[1]) > 0.6 * len(words[0] | words[1])


@pytest.mark.slow
def test_any_shares_and_stores_give_the_same_bytes(
    dump: tuple[Path, Planted], tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 15_000)
    collect(dump[0], tmp_path / "whole")
    given = store.join(store_url, "in/wiki.xml.bz2")
    store.write_bytes(given, dump[0].read_bytes())
    folder = store.join(store_url, "out")
    words = ["--source", "wikipedia", "--input", given, "--output-dir", folder, "--workers", "1"]
    for share in (["--rank", "2"], ["--rank", "0"], ["--rank", "1"], []):
        argv = [*words, "--world-size", "3", *share]
        assert stage_main("collect", CollectConfig, "stages.collect.run", argv=argv) == 0
    assert contents(folder) == contents(tmp_path / "whole")


def test_an_index_that_lists_other_pages_is_refused(
    dump: tuple[Path, Planted], tmp_path: Path
) -> None:
    (tmp_path / "index.txt").write_text("100:1:A\n")
    with pytest.raises(DataError, match="lists 1 pages, and the dump has"):
        collect(dump[0], tmp_path / "out", multistream_index=[str(tmp_path / "index.txt")])
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "wikipedia"}, "--source wikipedia needs --input"),
        ({"source": "warc", "namespaces": (1,), "input": ("a",)}, "--namespaces is not for"),
        ({"input": ("a",)}, "--input is not for --source python; it is for wikipedia, warc"),
        ({"num_samples": 3}, "--num-samples is not for --source python; it is for all others"),
        ({"source": "html", "input": ("a",), "conversations": True}, "--conversations is not for"),
        ({"source": "html", "input": ("a",), "html_timeout_seconds": 0.0}, "must be above 0"),
        ({"source": "wikipedia", "input": ("a",), "namespaces": ()}, "--namespaces names none"),
        ({"source": "wikipedia", "input": ("a",), "rank": 2, "world_size": 2}, "--rank 2"),
    ],
)
def test_options_of_another_source_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CollectConfig(output_dir="out", **options)


def test_files_that_are_no_dump_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"must end in one of \.xml"):
        collect(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.txt").write_text("b")
    with pytest.raises(ConfigError, match=r"of 1 files, none ends in one of \.xml"):
        collect(tmp_path / "in", tmp_path / "out")
    (tmp_path / "c.xml").write_text("<mediawiki>")
    with pytest.raises(DataError, match="no <siteinfo>"):
        collect(tmp_path / "c.xml", tmp_path / "out")


def test_loose_json_gets_its_origin(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"t{i}", "url": f"u{i}"}) for i in range(5)] + ["{broken"]
    (tmp_path / "a.json").write_text("\n".join(lines) + "\n")
    options = {"source": "json", "on_bad_line": "skip", "input": [str(tmp_path / "a.json")]}
    given = {**options, "output_dir": str(tmp_path / "out"), "workers": 1}
    metrics = run_directly(CollectConfig, collect_run.run, **given)
    assert (metrics["kept_documents"], metrics["bad_lines"]) == (5, 1)
    kept = rows(tmp_path / "out", "documents")
    assert [row["url"] for row in kept] == [f"u{i}" for i in range(5)]
    assert all(row["origin"]["file"] == "a.json" for row in kept)
