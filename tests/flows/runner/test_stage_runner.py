"""The parts of a corpus that has fewer files than before."""

from __future__ import annotations

from pathlib import Path

from flows.runner.stage_runner import remove_other_parts
from flows.yard.read_profile import read_profile
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, publish
from trainyard.artifacts.output import Output


def test_parts_of_files_that_are_gone_are_removed(tmp_path: Path) -> None:
    for name in ("a", "a_b", "c"):
        output = Output.prefix(str(tmp_path / name))
        part = "_text_document.bin"
        record = store.write_bytes(output.file_url(part), b"1", part)
        publish(output.manifest_url, Manifest(stage="tokenize", files=(record,)), None)
    (tmp_path / "notes.txt").write_text("not ours")
    remove_other_parts([str(tmp_path / "a"), str(tmp_path / "c")])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "a.manifest.json",
        "a_text_document.bin",
        "c.manifest.json",
        "c_text_document.bin",
        "notes.txt",
    }


def test_run_folders_lie_beside_what_is_made_or_here_for_an_object_store(tmp_path: Path) -> None:
    place_of = read_profile("local").stage_environment
    assert place_of(str(tmp_path / "tiny")).run_folder == str(tmp_path / "tiny" / ".runs")
    assert place_of("s3://bucket/tiny").run_folder == str(Path("yard/tiny/.runs").absolute())
