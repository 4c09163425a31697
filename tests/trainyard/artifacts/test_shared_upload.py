"""One upload that several machines make: all agree on it, and its parts obey the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainyard.artifacts import store
from trainyard.artifacts.backends.multipart import MAX_PARTS, MIN_PART, MultipartUpload
from trainyard.artifacts.backends.readahead import ByteRange
from trainyard.artifacts.leftovers import uploads
from trainyard.artifacts.shared_upload import OpenParts, SharedUpload, join_in, part_bytes
from trainyard.artifacts.urls import join

BLOCK = 4 << 20


def test_parts_are_whole_blocks_and_few_enough() -> None:
    for size in (1, BLOCK, 10**9, 83_886_080_001, 10**12, 5 << 40):
        found = part_bytes(size, BLOCK)
        assert found % BLOCK == 0
        assert found >= MIN_PART
        assert -(-size // found) <= MAX_PARTS


class Aws:
    """What an upload asks of AWS, which copies no range of an object under 5 MiB."""

    def __init__(self, source_bytes: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self._source_bytes = source_bytes

    def address(self, url: str) -> dict[str, str]:
        return {"Bucket": "yard", "Key": url.rpartition("/")[2]}

    def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append((method, arguments["PartNumber"]))
        if method == "upload_part_copy":
            assert self._source_bytes >= MIN_PART, "InvalidRequest: the source is too small"
        return {"ETag": "e", "CopyPartResult": {"ETag": "e"}}


@pytest.mark.parametrize(
    ("source_bytes", "method"), [(MIN_PART - 1, "upload_part"), (MIN_PART, "upload_part_copy")]
)
@pytest.mark.parametrize("is_first_copy", [True, False])
def test_a_small_object_is_not_copied_as_the_last_part(
    source_bytes: int, method: str, is_first_copy: bool
) -> None:
    aws, size = Aws(source_bytes), 2 * MIN_PART + source_bytes
    upload = MultipartUpload(aws, "s3://yard/all.bin", "id")  # type: ignore[arg-type]
    out = OpenParts(
        *(upload, "s3://yard/all.bin", size, 2 * MIN_PART),
        lambda start, end: [ByteRange("s3://yard/part.bin", 0, end - start)],
    )
    out._may_copy = None if is_first_copy else True
    out.write(2 * MIN_PART, bytes(source_bytes))
    for future in out._pending:
        future.result()
    out.close()
    assert aws.calls == [(method, 2)]


@pytest.mark.slow
def test_all_that_begin_at_once_make_one_object(s3_url: str) -> None:
    url, folder = join(s3_url, "whole.bin"), join(s3_url, "shares")
    pieces = [bytes([number]) * MIN_PART for number in range(3)] + [b"end"]
    size = sum(map(len, pieces))

    def begin() -> SharedUpload:
        return join_in(folder, "key", url, size, MIN_PART)

    def make(number: int) -> tuple[str, dict[int, str]]:
        file = begin()
        with file.opened(lambda start, end: [None] * 2) as out:  # type: ignore[list-item]
            out.write(number * MIN_PART, pieces[number])
            return file.id, out.sync()

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(make, range(4)))
    assert len({upload_id for upload_id, _ in made}) == 1
    assert [left.url for left in uploads(s3_url)] == [url]  # those that lost are gone
    file = begin()
    file.publish(url, {number: etag for _, etags in made for number, etag in etags.items()})
    assert store.read_bytes(url) == b"".join(pieces)
    assert not file.exists()
    assert begin().id != file.id
