"""Inputs count by what they hold: a manifest's digest is taken, raw files are read once."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from trainyard.artifacts import inputs, store
from trainyard.artifacts.inputs import raw_digest, resolve
from trainyard.artifacts.manifest import Manifest, publish, read_slot, retire
from trainyard.errors import ArtifactError, ConfigError


def artifact(folder: str, names: tuple[str, ...]) -> Manifest:
    records = tuple(
        store.write_bytes(store.join(folder, name), name.encode(), name) for name in names
    )
    card = store.write_bytes(store.join(folder, "card.html"), b"card", volatile=True)
    manifest = Manifest(stage="collect", files=(*records, card))
    publish(store.join(folder, "manifest.json"), manifest, None)
    return manifest


def prefix_artifact(prefix: str) -> Manifest:
    record = store.write_bytes(prefix + "_text.bin", b"1", "_text.bin")
    manifest = Manifest(stage="tokenize", files=(record,))
    publish(prefix + ".manifest.json", manifest, None)
    return manifest


def test_a_folder_with_a_manifest_counts_by_it_and_is_not_read(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = artifact(store_url, ("b.jsonl", "a.jsonl"))
    monkeypatch.setattr(inputs, "read_digest", lambda url: pytest.fail(f"{url} was read"))
    found = resolve("input", [store_url])
    assert found.digest == manifest.output_digest
    assert [store.basename(url) for url in found.files] == ["a.jsonl", "b.jsonl"]
    one = resolve("input", [store.join(store_url, "a.jsonl")])
    assert one.digest == next(f.digest for f in manifest.files if f.path == "a.jsonl")


def test_a_prefix_with_a_manifest_counts_by_it(store_url: str) -> None:
    prefix = store.join(store_url, "corpus")
    manifest = prefix_artifact(prefix)
    found = resolve("data", [prefix])
    assert (found.files, found.digest) == ((prefix + "_text.bin",), manifest.output_digest)


def test_token_files_are_found_by_their_prefix(store_url: str) -> None:
    prefix = store.join(store_url, "my_text_document")
    store.write_bytes(prefix + ".bin", b"1")
    store.write_bytes(prefix + ".idx", b"2")
    assert resolve("data", [prefix]).files == (prefix + ".bin", prefix + ".idx")


def test_raw_files_count_by_contents_wherever_they_lie(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        store.write_bytes(str(tmp_path / folder / "a.txt"), b"same")
        store.write_bytes(str(tmp_path / folder / "b.txt"), b"other")
    assert resolve("i", [str(tmp_path / "x")]).digest == resolve("i", [str(tmp_path / "y")]).digest
    pattern = resolve("i", [str(tmp_path / "x" / "*.txt")])
    assert len(pattern.files) == 2
    store.write_bytes(str(tmp_path / "x" / "b.txt"), b"changed")
    assert resolve("i", [str(tmp_path / "x")]).digest != resolve("i", [str(tmp_path / "y")]).digest


def test_a_settled_raw_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    os.utime(path, (1e9, 1e9))
    before = resolve("i", [str(path)]).digest
    monkeypatch.setattr(inputs, "read_digest", lambda url: pytest.fail("read twice"))
    assert resolve("i", [str(path)]).digest == before


@pytest.mark.parametrize("seconds", [1e9, 2e9], ids=["old time", "new time"])
def test_a_raw_file_that_changed_is_read_again(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    os.utime(path, (1e9, 1e9))
    before = resolve("i", [str(path)]).digest
    time.sleep(0.02)  # a tick of the clock of the file system
    with path.open("r+b") as file:
        file.write(b"next")
    os.utime(path, (seconds, seconds))
    assert resolve("i", [str(path)]).digest != before


@pytest.mark.parametrize("blocked", ["", "digests"])
def test_where_digests_cannot_be_remembered_files_are_read_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    blocked: str,
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    in_the_way = tmp_path / "cache" / blocked
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("a file")
    for name in "ab":
        (tmp_path / name).write_bytes(b"text")
        os.utime(tmp_path / name, (1e9, 1e9))
    assert resolve("i", [str(tmp_path / "a")]).digest == resolve("i", [str(tmp_path / "b")]).digest
    (warning,) = caplog.records
    assert "cannot be saved" in warning.message
    assert "TRAINYARD_DIGESTS" in warning.message


def test_digests_are_remembered_by_many_at_once_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINYARD_DIGESTS", str(tmp_path / "shared"))
    monkeypatch.setattr("os.getpid", lambda: 7)  # as in each container
    (tmp_path / "raw").write_bytes(b"text")
    os.utime(tmp_path / "raw", (1e9, 1e9))
    url = str(tmp_path / "raw")
    with ThreadPoolExecutor(8) as threads:
        (digest,) = set(threads.map(lambda _: raw_digest(url), range(64)))
    assert not caplog.records
    (entry,) = (tmp_path / "shared").iterdir()
    assert json.loads(entry.read_text())["digest"] == digest
    monkeypatch.setattr("trainyard.artifacts.inputs.read_digest", lambda url: "read again")
    assert raw_digest(url) == digest


def test_a_folder_of_artifacts_counts_by_their_files_alone(store_url: str) -> None:
    prefix = store.join(store_url, "parts", "shard")
    manifest = prefix_artifact(prefix)
    before = resolve("input", [store.join(store_url, "parts")])
    assert before.files == (prefix + "_text.bin",)
    again = replace(manifest, run={"seconds": 9})
    store.write_bytes(prefix + ".manifest.json", json.dumps(again.to_document()).encode())
    store.write_bytes(prefix + ".work/unit.json", b"1")
    store.write_bytes(prefix + ".claim.json", b"1")
    assert resolve("input", [store.join(store_url, "parts")]).digest == before.digest


def test_what_is_missing_or_half_replaced_is_refused(store_url: str) -> None:
    with pytest.raises(ArtifactError, match="nowhere"):
        resolve("input", [store.join(store_url, "nowhere")])
    artifact(store_url, ("a.jsonl",))
    url = store.join(store_url, "manifest.json")
    slot = read_slot(url)
    assert slot is not None
    retire(url, slot, "a run")
    with pytest.raises(ArtifactError, match="has not finished; rerun that stage"):
        resolve("input", [store_url])


def test_nothing_of_an_artifact_that_is_being_replaced_is_an_input(store_url: str) -> None:
    folder = store.join(store_url, "corpus")
    artifact(folder, ("a.jsonl",))
    prefix = store.join(store_url, "parts", "shard")
    prefix_artifact(prefix)
    for manifest_url in (store.join(folder, "manifest.json"), prefix + ".manifest.json"):
        slot = read_slot(manifest_url)
        assert slot is not None
        retire(manifest_url, slot, "a run")
    for url in ("corpus/a.jsonl", "corpus/*.jsonl", "parts", "parts/shard", "parts/shard_text.bin"):
        with pytest.raises(ArtifactError, match="has not finished"):
            resolve("input", [store.join(store_url, url)])


def test_files_of_prefix_artifacts_count_by_their_manifests(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = store.join(store_url, "shard")
    names = ("_text_document.bin", "_text_document.idx")
    records = tuple(store.write_bytes(prefix + name, name.encode(), name) for name in names)
    publish(prefix + ".manifest.json", Manifest(stage="tokenize", files=records), None)
    monkeypatch.setattr(inputs, "read_digest", lambda url: pytest.fail(f"{url} was read"))
    found = resolve("data", [prefix + "_text_document"])
    assert found.files == tuple(prefix + name for name in names)
    assert resolve("data", [store_url]).digest == found.digest


def test_a_url_with_a_secret_in_it_is_refused_without_repeating_it() -> None:
    for url in ("https://user:hunter2@host/a.jsonl", "https://host/a.jsonl?sig=hunter2"):
        with pytest.raises(ConfigError, match="in the environment instead") as caught:
            resolve("input", [url])
        assert "hunter2" not in str(caught.value)
