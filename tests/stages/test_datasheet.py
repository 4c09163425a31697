"""The datasheet: its numbers are those of the stages, its page is sound whatever documents hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stages.clean.config import CleanConfig
from stages.datasheet import run as datasheet_run
from stages.datasheet.config import DatasheetConfig
from stages.decontaminate.config import DecontaminateConfig
from stages.dedup.config import DedupConfig
from stages.mix.config import MixConfig
from stages.report.collect import datasheet
from stages.runtime.cli import stage_main
from tests.stages.clean_runs import forge, prose, write
from tests.stages.directly import run_directly
from tests.stages.html_page import check_sound
from trainyard.artifacts import store
from trainyard.collection.datasheet import funnel_rows
from trainyard.errors import ArtifactError, ConfigError

HOSTILE = "<script>alert(1)</script>"


def make(stage: str, config: type, folder: Path, *words: str) -> str:
    """An output with its manifest."""
    argv = ["--output-dir", str(folder), "--workers", "1", *words]
    assert stage_main(stage, config, f"stages.{stage}.run", argv=argv) == 0
    return str(folder)


def sheet(folder: Path, documents: str, **options: Any) -> Any:
    given = {"documents": [documents], "output_prefix": f"{folder}/sheet", "workers": 1, **options}
    run_directly(DatasheetConfig, datasheet_run.run, **given)
    return store.read_json(f"{folder}/sheet.json")


def collected(tmp_path: Path) -> Path:
    texts = [prose(i) for i in range(40)]
    rows = [{"text": one, "url": f"https://h{i % 2}.org/{i}"} for i, one in enumerate(texts)]
    rows += [{"text": texts[i]} for i in (0, 0, 1)]
    rows += [{"text": f"{HOSTILE} {HOSTILE}", "license": HOSTILE} for _ in range(3)]
    return write(tmp_path / "in.jsonl", rows)


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    """The outputs of the four stages, in order."""
    given = str(collected(tmp_path))
    first = make("clean", CleanConfig, tmp_path / "clean", "--input", given, "--rules", "min_words")
    words = ["--input", f"{first}/documents-*.jsonl"]
    second = make("dedup", DedupConfig, tmp_path / "unique", *words)
    leak = write(tmp_path / "leak.jsonl", [{"text": " ".join(prose(7).split()[3:20])}])
    words = ["--input", f"{second}/documents-*.jsonl", "--tasks", "mine", "--task-data", str(leak)]
    words += ["--key-threshold", "0", "--mode", "drop"]
    third = make("decontaminate", DecontaminateConfig, tmp_path / "rid", *words)
    words = ["--input", f"{third}/documents-*.jsonl", "--sources", "web"]
    return [first, second, third, make("mix", MixConfig, tmp_path / "mixture", *words)]


@pytest.mark.slow
def test_the_funnel_counts_what_each_rule_removed(tmp_path: Path, made: list[str]) -> None:
    found = sheet(tmp_path, f"{made[-1]}/documents-*.jsonl", folders=made, licenses=["CC0"])
    assert list(funnel_rows(found["steps"])) == [
        ("sources", 46, 46),
        ("clean: min_words", 46, 43),
        ("dedup: exact", 43, 40),
        ("decontaminate: contaminated", 40, 39),
        ("corpus", 39, 39),
    ]
    assert found["steps"][1]["clusters"] == [[2, 1], [3, 1]]
    assert found["steps"][2]["tasks"]["mine"]["documents"] == 1
    assert found["steps"][3]["mixture"]["web"]["mixed_documents"] == 39
    assert (found["documents"], found["licenses"]) == (39, ["CC0"])
    assert {"h0.org", "h1.org"} <= {name for name, _ in found["hosts"]}
    assert found["sources"] == [["web", 39]]
    assert found["languages"][0][0] == "en"
    page = (tmp_path / "sheet.html").read_text()
    check_sound(page)
    assert "<svg" in page
    assert HOSTILE not in page
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in page  # among the samples


@pytest.mark.slow
def test_the_run_card_has_the_same_section(tmp_path: Path, made: list[str]) -> None:
    sheet(tmp_path, f"{made[-1]}/documents-*.jsonl", folders=made)
    section = str(datasheet(f"{tmp_path}/sheet"))
    assert section in (tmp_path / "sheet.html").read_text()
    (tmp_path / "sheet.json").write_text('{"steps": 3}')
    with pytest.raises(ArtifactError, match="not the data of a datasheet"):
        datasheet(f"{tmp_path}/sheet")


@pytest.mark.slow
def test_documents_alone_make_a_sheet_without_pictures_of_rules(tmp_path: Path) -> None:
    found = sheet(tmp_path, str(collected(tmp_path)), num_identified=10)
    assert found["steps"] == []
    assert sum(count for _, count in found["languages"]) == 10
    assert found["document_licenses"][0] == ["not named", 43]
    assert sum(count for _, count in found["lengths"]) == found["documents"] == 46
    page = (tmp_path / "sheet.html").read_text()
    assert not re.search("From the sources|Samples", page)


def test_a_folder_that_no_stage_reported_on_is_refused(tmp_path: Path, made: list[str]) -> None:
    given = str(collected(tmp_path))
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        sheet(tmp_path, given, folders=[str(tmp_path)])
    forge(Path(made[0]), "report.json", b"{}")
    with pytest.raises(ArtifactError, match="not the report of a stage from documents"):
        sheet(tmp_path, given, folders=made[:1])


def test_a_sheet_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--documents names no file"):
        DatasheetConfig(documents=(), output_prefix=str(tmp_path))
