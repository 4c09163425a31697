"""Fan-out: shares write blocks of one .bin, each its own; the join names it and writes the index.

The .bin is made in PREFIX.shares (`shared_file`). A share is an artifact beside it: `.nodes`, the
digests of its blocks (`subtree_digest`); `.block_sums`, what PREFIX.sums has of them;
`.share.json`, the file and the blocks that it wrote; `.blocks.json`, digests of what it read. So
the join copies nothing, and reads no token."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from stages.merge.config import MergeConfig
from stages.runtime.context import StageRun
from stages.runtime.joined_shares import share_manifests
from stages.runtime.share_digests import files_to_digest, write_blocks
from trainyard.artifacts import store
from trainyard.artifacts.digest import SHORT, digest_document
from trainyard.artifacts.inputs import Manifests, check_listed
from trainyard.artifacts.output import Output
from trainyard.artifacts.shared_file import SharedFile, join_in
from trainyard.artifacts.store import FileInfo, FileRecord
from trainyard.artifacts.subtree_digest import digest_of_nodes
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


def share_of(num_blocks: int, rank: int, world_size: int) -> range:
    """The blocks of a share: neighbours, as many as any other share has, or one more or less."""
    return range(num_blocks * rank // world_size, num_blocks * (rank + 1) // world_size)


def _key(stage: StageRun) -> str:
    """The key of the file that these inputs, options and code make."""
    return digest_document([stage.shares_lineage or stage.lineage, stage.code])[:SHORT]


# --- a share ----------------------------------------------------------------------------------


def make_share(config: MergeConfig, stage: StageRun, parts: Sequence[TokenPart]) -> dict[str, Any]:
    """Write the blocks of this share, but for those that a killed run wrote; its metrics."""
    assert config.rank is not None
    assert config.world_size is not None
    merged = MergedTokens(parts)
    blocks = share_of(merged.num_blocks, config.rank, config.world_size)
    sources = merged.sources(blocks)
    digested = files_to_digest((s.url, FileInfo(s.size_bytes, s.version)) for s in sources)
    expected = Expected(_listed_sums(stage, merged, blocks), frozenset(digested))
    stage.begin_replacing()
    file = join_in(config.shares_url, _key(stage), merged.size_bytes)
    digests: dict[str, dict[int, str]] = {}
    with stage.open(NODES) as nodes, stage.open(BLOCK_SUMS) as sums:
        for found in _make_segments(stage, file, merged, blocks, expected):
            nodes.write(found.nodes)
            sums.write(found.sums)
            for url, some in found.raw.items():
                digests.setdefault(url, {}).update(some)
    document = {"format_version": FORMAT_VERSION, "file": file.id, "blocks": len(blocks)}
    stage.write_json(SHARE, document, volatile=True)
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


def _make_segments(
    stage: StageRun, file: SharedFile, merged: MergedTokens, blocks: range, expected: Expected
) -> Iterator[Digests]:
    step = max(1, SEGMENT_BYTES // merged_blocks.BLOCK_BYTES)
    segments = [blocks[at : at + step] for at in range(0, len(blocks), step)]
    with file.opened() as out, stage.progress(merged.num_bytes(blocks), "bytes", "merge") as bar:
        for segment in segments:
            key = f"{file.id}-{segment.start:012d}"
            done = stage.work.published(key)
            if done is not None:
                bar.update(merged.num_bytes(segment))
                yield _from_document(done)
                continue
            found = make_blocks(merged, segment, expected, out.write, bar.update)
            out.sync()
            stage.check_claim()
            stage.work.publish(key, _to_document(found))
            yield found


def _to_document(found: Digests) -> dict[str, Any]:
    return {**asdict(found), "nodes": found.nodes.hex(), "sums": found.sums.hex()}


def _from_document(document: dict[str, Any]) -> Digests:
    raw = {url: {int(n): d for n, d in some.items()} for url, some in document["raw"].items()}
    return Digests(bytes.fromhex(document["nodes"]), bytes.fromhex(document["sums"]), raw)


# --- the join ---------------------------------------------------------------------------------


def join_shares(config: MergeConfig, stage: StageRun, parts: Sequence[TokenPart]) -> None:
    """Write PREFIX.sums, and give the .bin that the shares wrote its name."""
    assert stage.output is not None
    shares = config.all_shares()
    file_id = _common_file(stage, shares)
    size = MergedTokens(parts).size_bytes
    digest = digest_of_nodes(b"".join(store.read_bytes(one.file_url(NODES)) for one in shares))
    with stage.open(SUMS, volatile=True) as out:
        write_sums(out, (store.read_bytes(one.file_url(BLOCK_SUMS)) for one in shares))
    _publish(config, stage, SharedFile(config.shares_url, _key(stage), file_id), size)
    stage.record(FileRecord(".bin", size, digest))


def _common_file(stage: StageRun, shares: Sequence[Output]) -> str:
    """The id of the file that all shares wrote."""
    share_manifests(stage, shares, "merge")
    ids = [_read_share(one.file_url(SHARE)) for one in shares]
    if len(set(ids)) > 1:
        raise ArtifactError(
            f"{store.parent(shares[0].url)}: its shares were written into {len(set(ids))} files, "
            "as one was removed in between; make all of them again, with --force"
        )
    return ids[0]


def _publish(config: MergeConfig, stage: StageRun, file: SharedFile, size: int) -> None:
    """Name the file, unless a killed join did: one that began to has left a note."""
    assert stage.output is not None
    url, note = stage.output.file_url(".bin"), f"named-{file.id}"
    if file.exists():
        stage.begin_final(".bin")
        stage.work.publish(note, {})
        file.publish(url)
    elif stage.work.published(note) is None or store.info(url).size_bytes != size:
        raise ArtifactError(
            f"{file.url}: the file that the shares wrote is gone; make all of them again, with "
            "--force"
        )


def _read_share(url: str) -> str:
    """The id of the file that a share wrote."""
    document: Any = store.read_json(url)
    try:
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError("of another version")
        return str(document["file"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{url}: not the account of a share ({error!r})") from error
