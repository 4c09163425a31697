"""Joins the shares of several runs, each a separate artifact, to the bytes of one run."""

from __future__ import annotations

from collections.abc import Sequence

from stages.retro_embed.blocks import Block
from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.context import StageRun
from stages.runtime.finished_files import finish_file, finished_file
from stages.runtime.joined_shares import share_manifests
from trainyard.artifacts import store
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import SourceFile
from trainyard.errors import ArtifactError


def join_shares(
    config: RetroEmbedConfig, stage: StageRun, blocks: Sequence[Block]
) -> dict[str, int]:
    """Copy the blocks of all shares to the output; returns the sums of their metrics."""
    assert config.world_size is not None
    shares = [Output.directory(config.share_folder(rank)) for rank in range(config.world_size)]
    manifests = share_manifests(stage, shares, "retro_embed")
    size = sum(record.size_bytes for manifest in manifests for record in manifest.files)
    with stage.progress(size, "bytes", "join") as progress:
        for number, block in enumerate(blocks):
            rank = number % config.world_size
            record = manifests[rank].record(block.name)
            if record is None:
                raise ArtifactError(f"{shares[rank].manifest_url}: does not list {block.name}")
            if finished_file(stage, block.key) is None:
                url = shares[rank].file_url(block.name)
                found = store.info(url)
                with stage.open(block.name) as out:
                    (digest,) = out.append_files([SourceFile(url, found.size_bytes, found.version)])
                    check_digest(url, record, digest)
                finish_file(stage, block.key, out.record, {})
            progress.update(record.size_bytes)
    return {
        name: sum(manifest.metrics[name] for manifest in manifests)
        for name in ("tokens", "seconds")
    } | {"dimensions": max(manifest.metrics["dimensions"] for manifest in manifests)}
