"""Pictures on Prefect's pages: standalone SVG documents from manifests and ledgers."""

from __future__ import annotations

import base64
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from threading import Barrier

import pytest

from flows.pages.charts import data_url, lineage_page, lineage_picture, loss_curve, read_lineage
from stages.report import lineage
from trainyard.artifacts import inputs
from trainyard.artifacts.block_digest import MARK
from trainyard.artifacts.manifest import InputRecord, Manifest, publish, read_manifest

SVG = "{http://www.w3.org/2000/svg}"


def ledger(*losses: float | None) -> bytes:
    lines = [
        json.dumps({"step": step, "lm_loss": loss, "validation_loss": loss if step == 2 else None})
        for step, loss in enumerate(losses)
    ]
    return "\n".join(lines).encode()


def test_the_loss_curve_is_a_picture_of_every_step() -> None:
    drawn = loss_curve(ledger(4.0, 3.0, 2.5, None), "ledger.jsonl", "pretrain & more")
    assert drawn is not None
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"pretrain & more", "training 2.500", "validation 2.500"} <= set(texts)
    line = next(path.get("d") for path in root.iter(f"{SVG}path"))
    assert line is not None
    assert line.count("L") == 2  # three points: the last step has no loss


def test_a_ledger_without_a_loss_has_no_picture() -> None:
    assert loss_curve(b"", "ledger.jsonl", "x") is None
    assert loss_curve(ledger(None), "ledger.jsonl", "x") is None


def test_a_data_url_is_the_picture() -> None:
    kind, _, data = data_url("<svg/>").partition(",")
    assert (kind, base64.b64decode(data)) == ("data:image/svg+xml;base64", b"<svg/>")


def make(folder: Path, stage: str, digest: str = "0" * 64, **inputs: str) -> str:
    folder.mkdir()
    records = {name: InputRecord((url,), digest) for name, url in inputs.items()}
    publish(str(folder / "manifest.json"), Manifest(stage=stage, inputs=records), None)
    return str(folder)


def test_lineage_is_drawn_from_manifests(tmp_path: Path) -> None:
    corpus = make(tmp_path / "corpus", "collect", source=str(tmp_path / "raw|text"))
    run = make(tmp_path / "run", "pretrain")
    card = make(tmp_path / "card", "report", checkpoint=run)
    found = read_lineage([corpus, run, card], run)
    root = ElementTree.fromstring(lineage_picture(found))
    assert root.get("viewBox")
    names = {text.text for text in root.iter(f"{SVG}text") if text.get("class") == "name"}
    assert {"pretrain", "report"} <= names
    page = lineage_page(found)
    assert page.startswith("![What this run was made of](data:image/svg+xml;base64,")
    assert "raw\\|text" in page
    assert "| pretrain |" in page
    assert f"- pretrain: `{run}`" in page


def test_an_input_that_shares_digested_in_blocks_is_no_earlier_one(tmp_path: Path) -> None:
    corpus = make(tmp_path / "corpus", "collect")
    made = read_manifest(f"{corpus}/manifest.json")
    assert made is not None
    marked = MARK + made[0].output_digest
    run = make(tmp_path / "run", "clean", marked, input=corpus)
    assert read_lineage([run], run).edges == ((corpus, run),)


def test_manifests_of_many_parts_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [make(tmp_path / f"part-{n}", "tokenize") for n in range(4)]
    run = make(tmp_path / "run", "merge")
    record = InputRecord(tuple(parts), "0" * 64)
    merged = Manifest(stage="merge", inputs={"input": record})
    (tmp_path / "run/manifest.json").write_text(json.dumps(merged.to_document()))
    together = Barrier(len(parts))

    def manifest_at(key: str) -> Manifest | None:
        if key in parts:
            together.wait(timeout=20)
        found = read_manifest(f"{key}/manifest.json")
        return found[0] if found is not None else None

    monkeypatch.setattr(inputs, "is_local", lambda _: False)
    monkeypatch.setattr(lineage, "_manifest_at", manifest_at)
    found = read_lineage([run], run)
    assert [one.count for one in found.artifacts] == [4, 1]
