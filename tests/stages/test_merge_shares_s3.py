"""A merge in shares into an object store: parts of one upload, joined to the object of one run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.merge import shares as merge_shares
from tests.stages.test_merge_shares import contents, merge
from tests.stages.tokenize_runs import manifest
from trainyard.artifacts import shared_upload, store
from trainyard.artifacts.backends.multipart import MIN_PART
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.leftovers import uploads
from trainyard.artifacts.urls import join
from trainyard.corpus import merged_blocks
from trainyard.corpus.indexed import IndexedWriter
from trainyard.errors import InfrastructureError

pytestmark = pytest.mark.slow

SIZES = (2_700_000, 3, 300_000, 2_300_000)
"""Tokens of pairs: three parts of the least size, of which the first is of one pair, the second of
all, and the last a short one of the last pair, shorter than a store may copy."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_blocks, "BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr(merge_shares, "SEGMENT_BYTES", MIN_PART)
    monkeypatch.setattr(shared_upload, "LEAST_PART_BYTES", MIN_PART)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The calls of the store that make parts, and the numbers of the parts."""
    made: list[tuple[str, int]] = []
    call = S3Backend.call

    def noted(self: S3Backend, method: str, **arguments: Any) -> Any:
        if method.startswith("upload_part"):
            made.append((method, arguments["PartNumber"]))
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", noted)
    return made


def put_raw(folder: str) -> str:
    """Pairs that no manifest lists."""
    for number, size in enumerate(SIZES):
        prefix = join(folder, f"{number:02d}")
        tokens = np.random.default_rng(number).integers(0, 60_000, size, np.uint16)
        with store.open_output(prefix + ".bin") as out, store.open_output(prefix + ".idx") as idx:
            writer = IndexedWriter(out, np.uint16)
            writer.add_flat(tokens, [size])
            writer.write_index(idx)
    return folder


def make_shares(source: str, prefix: str, world_size: int, ranks: str) -> None:
    for rank in ranks:
        assert merge(source, prefix, "--rank", rank, "--world-size", str(world_size)) == 0


@pytest.mark.parametrize(("from_store", "num_copied"), [(True, 1), (False, 0)])
def test_joined_shares_are_the_object_of_one_run(
    from_store: bool,
    num_copied: int,
    tmp_path: Path,
    s3_url: str,
    calls: list[tuple[str, int]],
) -> None:
    source = put_raw(join(s3_url, "raw") if from_store else str(tmp_path / "raw"))
    whole, joined = str(tmp_path / "whole"), join(s3_url, "joined")
    assert merge(source, whole) == 0
    calls.clear()
    make_shares(source, joined, 3, "201")
    assert sorted(number for _, number in calls) == [1, 2, 3]
    assert Counter(method for method, _ in calls)["upload_part_copy"] == num_copied
    assert not store.exists(joined + ".bin")
    made = len(calls)
    assert merge(source, joined, "--world-size", "3") == 0
    assert len(calls) == made, "the join made parts"
    assert contents(joined) == contents(whole)
    one, other = manifest(whole), manifest(joined)
    assert (one.files, one.output_digest) == (other.files, other.output_digest)
    assert store.list_files(joined + ".shares") == {}
    assert uploads(s3_url) == []
    for again in (("--rank", "0", "--world-size", "3"), ("--world-size", "3"), ()):
        assert merge(source, joined, *again) == 0
    assert manifest(joined).run == other.run


def failing(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> Callable[[], None]:
    """All but the first call of this name fail, until the function returned is called."""
    call, seen = S3Backend.call, []

    def sometimes(self: S3Backend, name: str, **arguments: Any) -> Any:
        if name == method:
            seen.append(name)
            if len(seen) > 1:
                raise error
        return call(self, name, **arguments)

    monkeypatch.setattr(S3Backend, "call", sometimes)
    return lambda: monkeypatch.setattr(S3Backend, "call", call)


def test_a_killed_share_goes_on_after_its_last_segment(
    tmp_path: Path, s3_url: str, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, prefix = put_raw(str(tmp_path / "raw")), join(s3_url, "out")
    mend = failing(monkeypatch, "upload_part", InfrastructureError("the store is away"))
    assert merge(source, prefix, "--rank", "0", "--world-size", "1") == 3
    mend()
    assert calls == [("upload_part", 1)]
    make_shares(source, prefix, 1, "0")
    assert sorted(number for _, number in calls) == [1, 2, 3]
    assert merge(source, prefix, "--world-size", "1") == 0
    assert merge(source, str(tmp_path / "whole")) == 0
    assert contents(prefix) == contents(str(tmp_path / "whole"))


@pytest.mark.parametrize("is_done", [False, True])
def test_a_join_that_was_killed_as_it_completed_the_object_goes_on(
    is_done: bool, tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, prefix = put_raw(str(tmp_path / "raw")), join(s3_url, "out")
    make_shares(source, prefix, 1, "0")
    call = S3Backend.call

    def killed(self: S3Backend, method: str, **arguments: Any) -> Any:
        if method != "complete_multipart_upload":
            return call(self, method, **arguments)
        if is_done:
            call(self, method, **arguments)
        raise InfrastructureError("the store is away")

    monkeypatch.setattr(S3Backend, "call", killed)
    assert merge(source, prefix, "--world-size", "1") == 3
    assert store.exists(prefix + ".bin") == is_done
    monkeypatch.setattr(S3Backend, "call", call)
    assert merge(source, prefix, "--world-size", "1") == 0
    assert merge(source, str(tmp_path / "whole")) == 0
    assert contents(prefix) == contents(str(tmp_path / "whole"))


def test_a_store_that_does_not_copy_gets_the_bytes(
    tmp_path: Path, s3_url: str, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = S3Backend.call

    def unable(self: S3Backend, method: str, **arguments: Any) -> Any:
        if method == "upload_part_copy":
            raise InfrastructureError("the store refused upload_part_copy: NotImplemented")
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", unable)
    source, prefix = put_raw(join(s3_url, "raw")), join(s3_url, "out")
    calls.clear()
    make_shares(source, prefix, 2, "01")
    assert sorted(calls) == [("upload_part", number) for number in (1, 2, 3)]
    assert merge(source, prefix, "--world-size", "2") == 0
    assert merge(source, str(tmp_path / "whole")) == 0
    assert contents(prefix) == contents(str(tmp_path / "whole"))


def test_a_source_that_changes_while_it_is_copied_is_refused(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, prefix = put_raw(join(s3_url, "raw")), join(s3_url, "out")
    sync = shared_upload.OpenParts.sync

    def late(self: shared_upload.OpenParts) -> dict[int, str]:
        store.write_bytes(join(source, "00.bin"), bytes(2 * SIZES[0]))
        return sync(self)

    monkeypatch.setattr(shared_upload.OpenParts, "sync", late)
    assert merge(source, prefix, "--rank", "0", "--world-size", "2") == 1
    assert "00.bin: changed while it was being read" in capsys.readouterr().err


def test_shares_of_an_upload_that_is_gone_are_made_again(
    tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, prefix, size = put_raw(str(tmp_path / "raw")), join(s3_url, "out"), "--world-size=2"
    make_shares(source, prefix, 2, "01")
    shared_upload.abort_all(prefix + ".bin")
    assert merge(source, prefix, size) == 1
    assert "out.bin that the shares made is gone: completed, or aborted" in capsys.readouterr().err
    assert merge(source, prefix, "--rank", "0", size, "--force") == 0
    assert merge(source, prefix, size) == 1
    assert "its shares were written into 2 files" in capsys.readouterr().err
    assert merge(source, prefix, "--rank", "1", size, "--force") == 0
    assert merge(source, prefix, size) == 0
    assert store.info(prefix + ".bin").size_bytes == 2 * sum(SIZES)


def test_shares_that_tell_of_too_few_parts_make_no_shorter_object(
    tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, prefix = put_raw(str(tmp_path / "raw")), join(s3_url, "out")
    make_shares(source, prefix, 1, "0")
    url = join(prefix + ".shares", "00000-of-00001.share.json")
    document = store.read_json(url)
    del document["etags"]["3"]
    store.write_bytes(url, json.dumps(document).encode())
    assert merge(source, prefix, "--world-size", "1") == 1
    assert "its shares record 2 parts of the .bin, which has 3" in capsys.readouterr().err
    assert not store.exists(prefix + ".bin")


def test_a_run_that_may_not_list_uploads_is_complete(
    tmp_path: Path,
    s3_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, prefix = put_raw(str(tmp_path / "raw")), join(s3_url, "out")
    make_shares(source, prefix, 2, "0")
    call = S3Backend.call

    def denied(self: S3Backend, method: str, **arguments: Any) -> Any:
        if method == "list_multipart_uploads":
            raise InfrastructureError(f"the store refused {method}: AccessDenied")
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", denied)
    assert merge(source, prefix) == 0
    assert "could not clean up" in capsys.readouterr().err
    assert store.info(prefix + ".bin").size_bytes == 2 * sum(SIZES)


@pytest.mark.parametrize("more", [("--world-size", "2"), ()])
def test_no_upload_of_killed_shares_is_left(
    more: tuple[str, ...], tmp_path: Path, s3_url: str
) -> None:
    source, prefix = put_raw(str(tmp_path / "raw")), join(s3_url, "out")
    make_shares(source, prefix, 2, "01")
    backend, others = S3Backend("s3"), join(s3_url, "out.bin2")
    for url in (prefix + ".bin", others):  # the first one of a share killed before it told of it
        backend.call("create_multipart_upload", **backend.address(url))
    assert len(uploads(s3_url)) == 3
    assert merge(source, prefix, *more) == 0
    assert [left.url for left in uploads(s3_url)] == [others]
