"""Joins the shares of several runs, each a separate artifact, to the bytes of one run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from stages.retro_embed.blocks import Block
from stages.retro_embed.config import RetroEmbedConfig
from stages.runtime.context import StageRun
from stages.runtime.finished_files import finish_file, finished_file
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, check_digest, read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import SourceFile
from trainyard.errors import ArtifactError

SHOWN = 8


def join_shares(
    config: RetroEmbedConfig, stage: StageRun, blocks: Sequence[Block]
) -> dict[str, int]:
    """Copy the blocks of all shares to the output; returns the sums of their metrics."""
    assert config.world_size is not None
    shares = [Output.directory(config.share_folder(rank)) for rank in range(config.world_size)]
    manifests = _manifests(config, stage, [read_manifest(s.manifest_url) for s in shares])
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


def _manifests(
    config: RetroEmbedConfig, stage: StageRun, found: Sequence[tuple[Manifest, str] | None]
) -> list[Manifest]:
    """All shares are done, of this very input, with these options and this code."""
    missing = [rank for rank, one in enumerate(found) if one is None]
    if missing:
        raise ArtifactError(_unfit(config, missing, "not made yet"))
    manifests = [one[0] for one in found if one is not None]
    of_others = [rank for rank, one in enumerate(manifests) if one.lineage != stage.lineage]
    if of_others:
        raise ArtifactError(_unfit(config, of_others, "made of other inputs or other options"))
    older = [rank for rank, one in enumerate(manifests) if one.code.get("digest") != stage.code]
    if older:
        raise ArtifactError(_unfit(config, older, "made of another code"))
    return manifests


def _unfit(config: RetroEmbedConfig, ranks: Sequence[int], why: str) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    rest = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    command = shlex.join([*sys.argv[1:], "--rank", str(ranks[0])])
    return (
        f"{config.shares_url}: of {config.world_size} shares, those of rank {shown}{rest} are "
        f"{why}; run each, then this again: python -m stages.retro_embed {command}"
    )
