"""certify names the first broken link of a run with torn or missing documents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.stages.test_certify import command, found_in, link_in
from trainyard.errors import ArtifactError

pytestmark = pytest.mark.slow


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A finished run, to be damaged."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


TORN = b'{"format_version": 1, "status'


@pytest.mark.parametrize(
    ("name", "link", "words"),
    [
        ("iter_0000006/state.json", (6, "state"), "state.json: 29 bytes, manifest.json says"),
        ("iter_0000008/state.json", (8, "state"), "state.json: 29 bytes, manifest.json says"),
        ("iter_0000003/state.json", (3, "state"), "state.json: 29 bytes, manifest.json says"),
        ("iter_0000006/manifest.json", (4, "steps"), "manifest.json: not a manifest"),
        ("iter_0000008/manifest.json", (7, "steps"), "manifest.json: not a manifest"),
        ("iter_0000003/manifest.json", (1, "steps"), "manifest.json: not a manifest"),
        ("iter_0000008/config.json", (8, "files"), "config.json: 29 bytes, manifest.json says"),
        ("iter_0000008/ledger.jsonl", (7, "steps"), "ledger.jsonl: a line of the ledger is not"),
        ("manifest.json", (8, "files"), "manifest.json: not a manifest"),
    ],
)
def test_a_truncated_document_is_a_broken_link(
    copied: Path, name: str, link: tuple[int, str], words: str
) -> None:
    (copied / name).write_bytes(TORN)
    found = link_in(copied)
    assert (found.step, found.check) == link
    assert words in found.found
    assert str(copied) not in found.text, "equal runs, equal certificates"
    done = command(copied, expect=1)
    assert f"the first broken link: step {link[0]}, {link[1]} (" in done.err


def test_a_missing_document_is_a_broken_link(copied: Path) -> None:
    (copied / "iter_0000006/state.json").unlink()
    assert link_in(copied)[:2] == (6, "state")
    (copied / "iter_0000006/ledger.jsonl").unlink()
    assert link_in(copied)[:2] == (4, "steps")
    (copied / "ledger.jsonl").unlink()
    assert not found_in(copied).is_proven


def test_a_run_without_a_readable_step_is_refused(copied: Path) -> None:
    for step in (3, 6, 8):
        (copied / f"iter_{step:07d}/state.json").write_bytes(TORN)
    with pytest.raises(ArtifactError, match=r"none of its steps can be read: .*state.json: 29"):
        found_in(copied)
    for step in (3, 6, 8):
        (copied / f"iter_{step:07d}/manifest.json").write_bytes(TORN)
    with pytest.raises(ArtifactError, match="none of its manifests can be read: "):
        found_in(copied)


def test_files_that_differ_from_the_manifests_are_named(copied: Path) -> None:
    weights = next((copied / "iter_0000006").glob("model-*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert found_in(copied).is_proven  # sizes alone
    link = link_in(copied, check_digests=True)
    assert (link.step, link.check, link.where) == (6, "files", f"iter_0000006/{weights.name}")
    weights.write_bytes(data[:-1])
    assert link_in(copied).expected == f"{len(data)} bytes"
    weights.unlink()
    assert link_in(copied).found == "no such file"


def test_a_missing_checkpoint_is_a_gap(copied: Path) -> None:
    shutil.rmtree(copied / "iter_0000006")
    assert link_in(copied)[:4] == (4, "steps", "step 4", "step 7")
