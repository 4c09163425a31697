"""An artifact names folders with manifests of their own, and holds their files all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.runtime.context import StageRun
from stages.verify.config import VerifyConfig
from stages.verify.run import run as verify
from trainyard.artifacts import store
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import (
    Manifest,
    PartRecord,
    publish,
    read_manifest,
    read_slot,
    retire,
)
from trainyard.artifacts.parts import remove_others, wrong_file
from trainyard.config import from_dict
from trainyard.errors import ArtifactError

NAMES = ("a.safetensors", "tokenizer/t.json")


def make(url: str, *steps: str) -> Manifest:
    """A run with a ledger and these steps of two files each."""
    parts = []
    for step in steps:
        at = store.join(url, step)
        files = [store.write_bytes(store.join(at, n), f"{step} {n}".encode(), n) for n in NAMES]
        manifest = Manifest(stage="pretrain", files=tuple(files), run={"spans": step})
        publish(store.join(at, "manifest.json"), manifest, None)
        parts.append(PartRecord.of(step, manifest))
    ledger = store.write_bytes(store.join(url, "ledger.jsonl"), b"{}\n", "ledger.jsonl")
    run = Manifest(stage="pretrain", files=(ledger,), parts=tuple(reversed(parts)))
    publish(store.join(url, "manifest.json"), run, None)
    return run


def test_a_run_names_its_steps(store_url: str) -> None:
    run = make(store_url, "iter_1", "iter_2")
    url = store.join(store_url, "manifest.json")
    found = read_manifest(url)
    assert found is not None
    assert found[0].output_digest == run.output_digest
    assert (found[0].num_files, found[0].size_bytes) == (5, run.size_bytes)
    assert [run.holds(n) for n in ("iter_1", "ledger.jsonl", "iter_3")] == [True, True, False]
    assert b"a.safetensors" not in store.read_bytes(url)
    given = resolve("load", (store_url,))
    assert given.digest == run.output_digest
    assert store.join(store_url, "iter_1/manifest.json") in given.files


def test_the_digest_of_a_run_sees_what_is_in_its_steps_alone(tmp_path: Path) -> None:
    run, again = make(str(tmp_path / "a"), "iter_1"), make(str(tmp_path / "b"), "iter_1")
    assert run.output_digest == again.output_digest
    other = PartRecord(run.parts[0].path, "0" * 64, run.parts[0].size_bytes, 2)
    changed = Manifest(stage="pretrain", files=run.files, parts=(other,))
    assert changed.output_digest != run.output_digest
    assert Manifest(stage="pretrain", files=run.files).to_document()["format_version"] == 1


Harm = Callable[[Path], object]

HARMS: dict[str, tuple[Harm, str | None]] = {
    "none": (lambda run: None, None),
    "a torn file beside": (lambda run: (run / "iter_1/.tmp-x").write_text("x"), None),
    "cut": (lambda run: (run / "iter_1/a.safetensors").write_text("i"), "iter_1/a.safetensors"),
    "gone": (lambda run: (run / "iter_2/tokenizer/t.json").unlink(), "iter_2/tokenizer/t.json"),
    "no manifest": (lambda run: (run / "iter_2/manifest.json").unlink(), "iter_2/manifest.json"),
    "no ledger": (lambda run: (run / "ledger.jsonl").unlink(), "ledger.jsonl"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_of_a_step_that_is_gone_or_cut_is_named(tmp_path: Path, harm: str) -> None:
    run = make(str(tmp_path), "iter_1", "iter_2")
    hurt, named = HARMS[harm]
    hurt(tmp_path)
    assert wrong_file(str(tmp_path), run, store.list_files(str(tmp_path))) == named


def test_a_step_that_was_replaced_is_not_the_one_that_the_run_names(tmp_path: Path) -> None:
    make(str(tmp_path), "iter_1", "iter_2")
    config = from_dict(VerifyConfig, {"url": [str(tmp_path)]})
    verify(config, StageRun("verify", {}, None))
    (tmp_path / "iter_1/a.safetensors").write_text("iter_1 a.safetensorz")
    path = tmp_path / "iter_2/manifest.json"
    other = Manifest(stage="pretrain").to_document()
    path.write_text(json.dumps(other))
    with pytest.raises(ArtifactError, match=r"(?s)2 of 5 files differ.*safetensors: exp.*replaced"):
        verify(config, StageRun("verify", {}, None))


def test_a_run_that_is_replaced_takes_its_former_steps_with_it(tmp_path: Path) -> None:
    make(str(tmp_path), "iter_1", "iter_2")
    url = str(tmp_path / "manifest.json")
    slot = read_slot(url)
    assert slot is not None
    retire(url, slot, "lineage")
    slot = read_slot(url)
    assert slot is not None
    assert set(slot.parts) == {"iter_1", "iter_2"}
    found = read_manifest(str(tmp_path / "iter_2/manifest.json"))
    assert found is not None
    now = Manifest(stage="pretrain", parts=(PartRecord.of("iter_2", found[0]),))
    remove_others(str(tmp_path), slot, now)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_2"]


@pytest.mark.parametrize(
    "change", [{"path": "../x"}, {"path": "iter_2"}, {"num_files": "2"}, {"size_bytes": -1}]
)
def test_a_part_that_cannot_be_true_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    make(str(tmp_path), "iter_1", "iter_2")
    path = tmp_path / "manifest.json"
    document = json.loads(path.read_text())
    document["parts"][0].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        read_manifest(str(path))
