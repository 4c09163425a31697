"""Manifests exist once, describe contents only, and are replaced only by whoever read them."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from trainyard.artifacts import conditional, store
from trainyard.artifacts.manifest import (
    InputRecord,
    Manifest,
    ManifestSlot,
    publish,
    read_manifest,
    read_slot,
    retire,
)
from trainyard.artifacts.store import FileRecord
from trainyard.errors import ArtifactError, InfrastructureError
from trainyard.testing.distributed import PRELOADED

FILES = (FileRecord("b.bin", 2, "22"), FileRecord("a.bin", 1, "11"))


def manifest(**changes: object) -> Manifest:
    values: dict[str, object] = {
        "stage": "tokenize",
        "inputs": {"input": InputRecord(("x.jsonl",), "aa")},
        "files": FILES,
    }
    return Manifest(**(values | changes))  # type: ignore[arg-type]


def test_a_manifest_is_read_back_as_it_was_published(store_url: str) -> None:
    url = store.join(store_url, "manifest.json")
    publish(url, manifest(), None)
    found = read_manifest(url)
    assert found is not None
    assert found[0].output_digest == manifest().output_digest
    assert found[0].inputs == manifest().inputs


def test_the_output_digest_does_not_see_order_volatile_files_or_metrics() -> None:
    card = FileRecord("card.html", 9, "99", volatile=True)
    same = manifest(files=(*reversed(FILES), card), metrics={"loss": 1.0}, run={"seconds": 3})
    assert same.output_digest == manifest().output_digest
    other = manifest(files=(FILES[0], FileRecord("a.bin", 1, "12")))
    assert other.output_digest != manifest().output_digest


def test_the_loser_of_a_race_gets_an_error(store_url: str) -> None:
    url = store.join(store_url, "manifest.json")
    publish(url, manifest(), None)
    with pytest.raises(InfrastructureError, match="another run published first"):
        publish(url, manifest(metrics={"x": 1}), None)


def test_an_artifact_that_is_being_replaced_does_not_exist(store_url: str) -> None:
    url = store.join(store_url, "manifest.json")
    publish(url, manifest(), None)
    slot = read_slot(url)
    assert slot is not None
    assert slot.files == ("a.bin", "b.bin")
    marked = retire(url, slot, by="run 2")
    assert read_manifest(url) is None
    assert read_slot(url) == ManifestSlot(marked.version, ("a.bin", "b.bin"))
    with pytest.raises(InfrastructureError, match="another run replaced"):
        retire(url, slot, by="run 3")
    publish(url, manifest(metrics={"x": 2}), marked.version)
    assert read_manifest(url) is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 99}, "newer than"),
        ({"output_digest": "00"}, "was edited"),
        ({"files": "nonsense"}, "not a manifest"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(
    store_url: str, change: dict[str, object], words: str
) -> None:
    url = store.join(store_url, "manifest.json")
    document = manifest().to_document() | change
    store.write_bytes(url, json.dumps(document).encode())
    with pytest.raises(ArtifactError, match=words):
        read_manifest(url)


def publish_from_another_process(job: tuple[str, int, float]) -> bool:
    url, number, start = job
    while time.time() < start:  # all at once, or it is no race
        pass
    try:
        publish(url, manifest(metrics={"publisher": number}), None)
    except InfrastructureError:
        return False
    return True


def take_over(environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server that forks may be older than the test's own


@pytest.mark.slow
def test_of_eight_racing_publishers_one_wins_ten_times_in_ten(store_url: str) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "botocore.session", "s3fs"])  # not eight times
    with ProcessPoolExecutor(8, context, take_over, (dict(os.environ),)) as pool:
        for attempt in range(10):
            url = store.join(store_url, f"race-{attempt}", "manifest.json")
            start = time.time() + (1.0 if attempt == 0 else 0.05)
            jobs = [(url, number, start) for number in range(8)]
            won = list(pool.map(publish_from_another_process, jobs))
            assert sum(won) == 1
            found = conditional.read_version(url)
            assert found is not None
            assert json.loads(found[0])["metrics"] == {"publisher": won.index(True)}
