"""Everything below a place with its age, and uploads that nobody completed."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainyard.artifacts import store
from trainyard.artifacts.backends.multipart import MIN_PART, MultipartUpload
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.leftovers import abort, entries, uploads
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError

pytestmark = pytest.mark.slow


def test_entries_are_what_a_listing_says_and_new(store_url: str) -> None:
    for name in ("b/c.bin", "a.bin", "b/.tmp-x"):
        store.write_bytes(join(store_url, name), name.encode())
    found = entries(store_url)
    assert {e.name: e.size_bytes for e in found} == store.list_files(store_url)
    assert [e.name for e in found] == sorted(e.name for e in found)
    assert all(0 <= e.age_seconds < 60 for e in found)
    assert entries(join(store_url, "nothing")) == []


def test_an_age_counts_from_the_last_write(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"1")
    os.utime(tmp_path / "old", (time.time() - 1000,) * 2)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = {entry.name: entry.age_seconds for entry in entries(str(tmp_path))}
    assert found["old"] == pytest.approx(1000, abs=5)
    assert "link" in found  # to nowhere, and takes up a name


def test_an_upload_in_the_making_is_seen_and_can_be_aborted(s3_url: str) -> None:
    backend = S3Backend("s3")
    upload = MultipartUpload(backend, join(s3_url, "a", "b.bin"))
    upload.upload(1, b"1" * MIN_PART)
    MultipartUpload(backend, join(s3_url + "-beside", "c.bin"))
    (found,) = uploads(s3_url)
    assert (found.url, found.size_bytes) == (join(s3_url, "a", "b.bin"), MIN_PART)
    abort(found)
    abort(found)  # gone already
    assert uploads(s3_url) == []
    assert len(uploads(s3_url + "-beside")) == 1


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many replies each listing came in, of two items at most."""
    limits = {"list_objects_v2": "MaxKeys", "list_multipart_uploads": "MaxUploads"}
    limits["list_parts"] = "MaxParts"
    count: Counter[str] = Counter()
    call = S3Backend.call

    def limited(self: S3Backend, method: str, **asked: Any) -> Any:
        count[method] += 1
        return call(self, method, **asked, **({limits[method]: 2} if method in limits else {}))

    monkeypatch.setattr(S3Backend, "call", limited)
    return count


def test_what_comes_in_pages_is_all_seen_and_nothing_twice(
    s3_url: str, pages: Counter[str]
) -> None:
    names = [f"{folder}/{k}.bin" for folder in ("a", "b") for k in range(3)]
    for name in names:
        store.write_bytes(join(s3_url, name), name.encode())
    assert [entry.name for entry in entries(s3_url)] == names
    assert pages["list_objects_v2"] == 3
    assert list(store.list_files(s3_url)) == names
    for name in names[:5]:
        upload = MultipartUpload(S3Backend("s3"), join(s3_url, "new", name))
        for part in (1, 2, 3):
            upload.upload(part, b"1" * (MIN_PART if part < 3 else 7))
    found = uploads(s3_url)
    assert sorted(each.url for each in found) == [join(s3_url, "new", name) for name in names[:5]]
    assert {each.size_bytes for each in found} == {2 * MIN_PART + 7}
    assert pages["list_parts"] == 5 * 2
    assert pages["list_multipart_uploads"] in (1, 3)  # moto cuts no list of uploads, Ceph does
    for each in found:
        abort(each)
    assert uploads(s3_url) == []


def test_a_file_system_has_no_uploads(tmp_path: Path) -> None:
    assert uploads(str(tmp_path)) == []


def test_other_stores_are_only_read_from() -> None:
    with pytest.raises(ConfigError, match="s3:// only"):
        entries("memory://somewhere")
