"""Fan-out: shares write blocks of one .bin, each its own; the join names it and writes the index.

The .bin is made in PREFIX.shares (`shared_file`), or in an object store as an upload to PREFIX.bin
(`shared_upload`). A share is an artifact in PREFIX.shares: `.nodes`, the digests of its blocks
(`subtree_digest`); `.block_sums`, what PREFIX.sums has of them; `.share.json`, the file and the
blocks that it wrote; `.blocks.json`, digests of what it read. So the join copies nothing, and reads
no token."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stages.merge.config import MergeConfig
from stages.merge.place import Place, place_of
from stages.runtime.context import StageRun
from stages.runtime.joined_shares import share_manifests
from stages.runtime.share_digests import files_to_digest, write_blocks
from trainyard.artifacts import shared_upload, store
from trainyard.artifacts.backends.base import log_failure
from trainyard.artifacts.backends.readahead import ByteRange
from trainyard.artifacts.digest import SHORT, digest_bytes
from trainyard.artifacts.inputs import Manifests, check_listed
from trainyard.artifacts.output import Output
from trainyard.artifacts.shared_file import ID, SharedFile
from trainyard.artifacts.shared_upload import SharedUpload
from trainyard.artifacts.store import FileInfo, FileRecord
from trainyard.artifacts.subtree_digest import digest_of_nodes
from trainyard.artifacts.urls import is_local
from trainyard.corpus import merged_blocks
from trainyard.corpus.merge import TokenPart
from trainyard.corpus.merged_blocks import Digests, Expected, MergedTokens, make_blocks
from trainyard.corpus.pairs import SHARE, SUMS
from trainyard.corpus.readers import map_listed
from trainyard.corpus.remote import CacheOptions
from trainyard.corpus.sums import Sums, write_sums
from trainyard.errors import ArtifactError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1

NODES, BLOCK_SUMS = ".nodes", ".block_sums"

SEGMENT_BYTES = 512 << 20
"""Bytes that a killed share writes again, at most."""


def share_of(num_blocks: int, rank: int, world_size: int, unit: int = 1) -> range:
    """The blocks of a share: neighbours, in whole units of this many blocks, as many units as any
    other share has, or one more or less."""
    num_units = -(-num_blocks // unit)
    begin, end = (num_units * n // world_size * unit for n in (rank, rank + 1))
    return range(begin, min(end, num_blocks))


def _short(file_id: str) -> str:
    """For names of units of work: the id of an upload may be long."""
    return digest_bytes(file_id.encode())[:SHORT]


# --- a share ----------------------------------------------------------------------------------


def make_share(config: MergeConfig, stage: StageRun, parts: Sequence[TokenPart]) -> dict[str, Any]:
    """Write the blocks of this share, but for those that a killed run wrote; its metrics."""
    assert config.rank is not None
    assert config.world_size is not None
    merged = MergedTokens(parts)
    place = place_of(config, stage, merged)
    blocks = share_of(merged.num_blocks, config.rank, config.world_size, place.unit)
    sources = merged.sources(blocks)
    digested = files_to_digest((s.url, FileInfo(s.size_bytes, s.version)) for s in sources)
    expected = Expected(_listed_sums(stage, merged, blocks), frozenset(digested))
    stage.begin_replacing()
    file = place.join_in()
    digests: dict[str, dict[int, str]] = {}
    etags: dict[int, str] = {}
    with stage.open(NODES) as nodes, stage.open(BLOCK_SUMS) as sums:
        for made in _make_segments(stage, file, merged, blocks, place.unit, expected):
            nodes.write(made.digests.nodes)
            sums.write(made.digests.sums)
            etags |= made.etags
            for url, some in made.digests.raw.items():
                digests.setdefault(url, {}).update(some)
    document = {"format_version": FORMAT_VERSION, "file": file.id, "blocks": len(blocks)}
    stage.write_json(SHARE, {**document, "etags": etags}, volatile=True)
    write_blocks(stage, digested, digests)
    metrics = {"blocks": len(blocks), "bytes": merged.num_bytes(blocks)}
    log.info("wrote blocks=%d bytes=%d", *metrics.values())
    return metrics


def _listed_sums(stage: StageRun, merged: MergedTokens, blocks: range) -> dict[str, Sums]:
    """The .sums of the share's sources whose manifest lists one. A source with a digest but without
    .sums is read whole, by the share that has its first byte."""
    manifests, found = Manifests(), {}
    options = CacheOptions(stage.scratch)
    begun = {source.url for source in merged.sources_begun(blocks)}
    for source in merged.sources(blocks):
        if manifests.record(source.url) is None:
            continue
        sums_url = source.url.removesuffix(".bin") + SUMS
        record = manifests.record(sums_url)
        if record is not None:
            raw = map_listed(sums_url, record, options)
            found[source.url] = Sums(raw, sums_url, source.size_bytes)
        elif source.url in begun:
            check_listed(source.url, manifests)
    return found


@dataclass(frozen=True, slots=True)
class _Segment:
    """Digests and ETags of written blocks."""

    digests: Digests
    etags: dict[int, str]
    """Of the parts of an upload, by number."""

    def to_document(self) -> dict[str, Any]:
        found = self.digests
        hexadecimal = {"nodes": found.nodes.hex(), "sums": found.sums.hex()}
        return {**asdict(found), **hexadecimal, "etags": self.etags}

    @staticmethod
    def from_document(document: dict[str, Any]) -> _Segment:
        raw = {url: {int(n): d for n, d in some.items()} for url, some in document["raw"].items()}
        nodes, sums = (bytes.fromhex(document[name]) for name in ("nodes", "sums"))
        etags = {int(number): etag for number, etag in document["etags"].items()}
        return _Segment(Digests(nodes, sums, raw), etags)


def _make_segments(
    stage: StageRun,
    file: SharedFile | SharedUpload,
    merged: MergedTokens,
    blocks: range,
    unit: int,
    expected: Expected,
) -> Iterator[_Segment]:
    def ranges(start: int, end: int) -> list[ByteRange]:
        found = merged.ranges(start, end)
        return [ByteRange(p.source.url, p.start, p.end, p.source.version) for p in found]

    step = unit * max(1, SEGMENT_BYTES // (unit * merged_blocks.BLOCK_BYTES))
    segments = [blocks[at : at + step] for at in range(0, len(blocks), step)]
    num_bytes = merged.num_bytes(blocks)
    with file.opened(ranges) as out, stage.progress(num_bytes, "bytes", "merge") as bar:
        for segment in segments:
            key = f"{_short(file.id)}-{segment.start:012d}"
            done = stage.work.published(key)
            if done is not None:
                bar.update(merged.num_bytes(segment))
                yield _Segment.from_document(done)
                continue
            found = make_blocks(merged, segment, expected, out.write, bar.update)
            made = _Segment(found, out.sync())
            stage.check_claim()
            stage.work.publish(key, made.to_document())
            yield made


# --- the join ---------------------------------------------------------------------------------


def join_shares(config: MergeConfig, stage: StageRun, parts: Sequence[TokenPart]) -> None:
    """Write PREFIX.sums, and give the .bin that the shares wrote its name."""
    shares = config.all_shares()
    place = place_of(config, stage, MergedTokens(parts))
    file_id, etags = _common_file(stage, shares)
    if etags.keys() != set(range(1, place.num_parts + 1)):
        raise ArtifactError(
            f"{config.shares_url}: its shares record {len(etags)} parts of the .bin, which has "
            f"{place.num_parts}; make all of them again, with --force"
        )
    digest = digest_of_nodes(b"".join(store.read_bytes(one.file_url(NODES)) for one in shares))
    with stage.open(SUMS, volatile=True) as out:
        write_sums(out, (store.read_bytes(one.file_url(BLOCK_SUMS)) for one in shares))
    _publish(stage, place, place.file(file_id), etags)
    stage.record(FileRecord(".bin", place.size_bytes, digest))


def abort_uploads(config: MergeConfig) -> None:
    """Remove what shares uploaded and no join took, now that the whole output is there."""
    if is_local(config.output_prefix):
        return
    if config.world_size is not None or store.list_folder(config.shares_url):
        with log_failure():  # what is left costs storage, until `flows.gc` or the bucket removes it
            shared_upload.abort_all(Output.prefix(config.output_prefix).file_url(".bin"))


def _common_file(stage: StageRun, shares: Sequence[Output]) -> tuple[str, dict[int, str]]:
    """The id of the file that all shares wrote, and the ETags of its parts."""
    share_manifests(stage, shares, "merge")
    found = [_read_share(one.file_url(SHARE)) for one in shares]
    ids = {file_id for file_id, _ in found}
    if len(ids) > 1:
        raise ArtifactError(
            f"{store.parent(shares[0].url)}: its shares were written into {len(ids)} files, "
            "as one was removed in between; make all of them again, with --force"
        )
    return ids.pop(), {number: etag for _, etags in found for number, etag in etags.items()}


def _publish(
    stage: StageRun, place: Place, file: SharedFile | SharedUpload, etags: dict[int, str]
) -> None:
    """Name the file, unless a killed join did: one that began to has left a note."""
    note = f"named-{_short(file.id)}"
    if file.exists():
        stage.begin_final(".bin")
        store.delete(place.bin_url)  # after the note, a file of that name is this one
        stage.work.publish(note, {})
        file.publish(place.bin_url, etags)
    elif stage.work.published(note) is None or not store.exists(place.bin_url):
        if isinstance(file, SharedUpload):
            raise ArtifactError(
                f"the multipart upload to {file.url} that the shares made is gone: completed, or "
                "aborted by a lifecycle rule of the bucket; make all shares again, with --force"
            )
        raise ArtifactError(
            f"{file.url}: the file that the shares wrote is gone; make all of them again, with "
            "--force"
        )


def _read_share(url: str) -> tuple[str, dict[int, str]]:
    """The id of the file that a share wrote, and the ETags of its parts."""
    document: Any = store.read_json(url)
    try:
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError("of another version")
        if not ID.fullmatch(document["file"]):
            raise ValueError("its file is no id")
        etags = {int(number): str(etag) for number, etag in document["etags"].items()}
        return document["file"], etags
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{url}: not the record of a share ({error!r})") from error
