"""From a step of a run to the page on the web that a document of it was collected from."""

from __future__ import annotations

import bz2
import json
import re
import shutil
from pathlib import Path

import pytest

from stages.clean.config import CleanConfig
from stages.clean.run import run as clean
from stages.collect.config import CollectConfig
from stages.collect.run import run as collect
from tests.stages.directly import run_directly
from tests.stages.test_blame import RUN, ask, blame_of
from tests.stages.tokenize_runs import tokenize
from trainyard.testing.wiki_dump import FIRST_REVISION, Plan, write_dump

pytestmark = pytest.mark.slow


def test_a_document_of_a_cleaned_corpus_leads_to_the_page_it_was_collected_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"text": "the yard opens before dawn " * 30, "url": "https://example.org/yard"}
    (tmp_path / "crawl.jsonl").write_text("".join(json.dumps(text) + "\n" for _ in range(12)))
    cleaned, prefix = str(tmp_path / "clean"), str(tmp_path / "tokens")
    given = {"input": [str(tmp_path / "crawl.jsonl")], "output_dir": cleaned, "workers": 1}
    run_directly(CleanConfig, clean, **given, rules=["nfc"])
    tokenize(f"{cleaned}/documents-*.jsonl", prefix, tokenizer_type="ByteLevelTokenizer")
    data = {**RUN, "split": "1,0,0", "data_path": [f"{prefix}_text_document"], "seed": 1}
    rows = ask(capsys, **data, sample=3)["rows"]
    size = len(json.dumps(text))
    for row in rows:
        number = row["line"] - 1
        place = {"file": "crawl.jsonl", "offset": number * (size + 1), "length": size}
        assert row["collected"] == {"origin": place, "url": text["url"]}
    capsys.readouterr()
    blame_of(**data, sample=3)
    shown = capsys.readouterr().out
    assert "https://example.org/yard crawl.jsonl:" in shown
    shutil.rmtree(cleaned)
    assert all(row["collected"] is None for row in ask(capsys, **data, sample=3)["rows"])


def test_a_document_of_a_dump_leads_to_its_wikipedia_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(tmp_path / "wiki.xml.bz2", Plan(articles=6, words=30, redirect_share=0))
    collected, prefix = str(tmp_path / "collected"), str(tmp_path / "tokens")
    given = {"input": [str(tmp_path / "wiki.xml.bz2")], "output_dir": collected, "workers": 1}
    run_directly(CollectConfig, collect, **given, source="wikipedia")
    tokenize(f"{collected}/documents-*.jsonl", prefix, tokenizer_type="ByteLevelTokenizer")
    data = {**RUN, "split": "1,0,0", "data_path": [f"{prefix}_text_document"], "seed": 1}
    for row in ask(capsys, **data, sample=3)["rows"]:
        page = row["collected"]
        assert page["url"] == f"https://example.org/wiki/{page['title'].replace(' ', '_')}"
        assert page["revision"] == str(FIRST_REVISION + int(row["id"]))
        place = page["origin"]
        stream = (tmp_path / "wiki.xml.bz2").read_bytes()[place["offset"] :]
        found = bz2.BZ2Decompressor().decompress(stream)[place["within"] :][: place["length"]]
        assert found.startswith(b"<page>")
        assert f"<title>{page['title']}</title>".encode() in found
        assert found.endswith(b"</page>")
    blame_of(**data, sample=3)
    shown = capsys.readouterr().out
    assert re.search(r"https://example.org/wiki/\S+ wiki.xml.bz2:\d+\+\d+-\d+", shown)
