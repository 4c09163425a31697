"""Dumps and lists of URLs to a clean corpus, by the real flow: what was planted is found, a new
dump makes a new version, and only the new dump is collected."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.collection.fetch.bad_server import BadServer
from tests.yard.yard import Ended, Yard
from trainyard.artifacts import store
from trainyard.testing import planted_found, wiki_dump

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]

RECIPE = """
corpus = ["{folder}/dumps/*.xml.bz2"]

[collect]
source = "wikipedia"

[clean]
preset = "wikipedia"

[dedup]
jaccard_threshold = 0.5
num_bands = 50

[decontaminate]
tasks = ["planted"]
task_data = ["{folder}/items.jsonl"]
key_threshold = 0

[mix]
"""


LISTS = """
corpus = ["{folder}/urls/*.txt"]

[fetch]
allow_private_addresses = true
host_delay_seconds = 0

[collect]
source = "warc"

[dedup]
"""


def collect(yard: Yard, text: str = RECIPE) -> tuple[Ended, dict[str, Any]]:
    done = yard.run("-m", "flows.collect_corpus", yard.recipe(text.format(folder=yard.folder)))
    assert done.status == 0, done.err
    return done, json.loads((yard.tiny / "current.json").read_text())


def test_what_was_planted_is_found_and_a_new_dump_is_a_new_version(
    tmp_path: Path,
    prefect_api: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = wiki_dump.Plan(articles=120, near_duplicate_share=0.2, leaked_share=0.1)
    planted = wiki_dump.write_dump(tmp_path / "dumps/one.xml.bz2", plan)
    wiki_dump.write_items(tmp_path / "items.jsonl", wiki_dump.evaluation_items(plan))
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    done, first = collect(yard)
    stages = ("collect-one.xml.bz2", "clean-one.xml.bz2", "dedup", "decontaminate", "mix")
    assert done.states() == dict.fromkeys((*stages, "datasheet", "corpus"), "done")
    assert done.out.strip().endswith(f"{first['datasheet']}.html")

    counts = {"near_duplicates": len(planted.near_duplicates), "leaked": len(planted.leaked)}
    names = ("articles", "redirects", "disambiguations", "others")
    counts |= {name: getattr(planted, name) for name in names}
    assert counts["near_duplicates"] > 10
    assert counts["leaked"] > 3
    store.write_bytes(f"{tmp_path}/planted.json", json.dumps(counts).encode())
    words = ["planted_found", f"{tmp_path}/planted.json", str(yard.tiny / "current.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert planted_found.main() == 0, capsys.readouterr().out
    store.write_bytes(f"{tmp_path}/planted.json", json.dumps({**counts, "leaked": 1}).encode())
    assert planted_found.main() == 1

    again, same = collect(yard)
    assert (again.states(), same) == ({"datasheet": "reused", "corpus": "done"}, first)
    wiki_dump.write_dump(tmp_path / "dumps/two.xml.bz2", wiki_dump.Plan(articles=30, seed=7))
    second, two = collect(yard)
    assert "collect-one.xml.bz2" not in second.states()
    assert (second.states()["collect-two.xml.bz2"], two["previous"]) == ("done", first["version"])
    (old,), (new,) = first["documents"], two["documents"]
    sizes = [sum(map(len, map(store.read_bytes, store.expand(one)))) for one in (old, new)]
    assert sizes[1] > sizes[0] > 0


def test_lists_of_urls_become_documents_and_only_a_new_list_is_fetched(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    (tmp_path / "urls").mkdir()
    with BadServer() as server:
        for name, paths in {"a": ("/page/1", "/404", "/private/x"), "b": ("/page/2",)}.items():
            (tmp_path / f"urls/{name}.txt").write_text("\n".join(map(server.url, paths)))
        done, found = collect(yard, LISTS)
        stages = [f"{stage}-{name}" for stage in ("fetch", "collect") for name in "ab"]
        assert done.states() == dict.fromkeys((*stages, "dedup", "datasheet", "corpus"), "done")
        sheet = store.read_json(f"{found['datasheet']}.json")
        fetched, *others = sheet["steps"]
        assert (fetched["stage"], fetched["documents"], fetched["kept"]) == ("fetch", 4, 2)
        gone = {rule: one["dropped"] for rule, one in fetched["reasons"].items() if one["dropped"]}
        assert gone == {"status": 1, "robots": 1}
        assert [one["stage"] for one in others] == ["collect", "dedup"]
        assert (sheet["documents"], sheet["hosts"]) == (1, [["127.0.0.1", 1]])  # pages are alike
        server.asked.clear()
        (tmp_path / "urls/c.txt").write_text(server.url("/page/3"))
        second, _ = collect(yard, LISTS)
    assert second.states()["fetch-c"] == "done"
    assert {path for _, path in server.asked} == {"/robots.txt", "/page/3"}
