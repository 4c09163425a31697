"""Check all pairs, then copy them into one, alone or in shares, or write the file that names
them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from stages.merge.config import MergeConfig
from stages.merge.shares import abort_uploads, join_shares, make_share
from stages.runtime.context import StageRun
from trainyard.artifacts.inputs import Manifests, metrics_of
from trainyard.artifacts.output import PARTS
from trainyard.artifacts.parts_list import read_parts
from trainyard.artifacts.urls import canonical_each
from trainyard.corpus.merge import (
    TokenPart,
    find_pairs,
    have_provenance,
    merge_index,
    merge_provenance,
    merge_tokens,
    survey,
    survey_outlines,
)
from trainyard.corpus.pairs import DOCS, SUMS
from trainyard.corpus.sums import BlockDigests
from trainyard.corpus.virtual import parts_list
from trainyard.errors import ConfigError, DataError

log = logging.getLogger(__name__)


def run(config: MergeConfig, stage: StageRun) -> dict[str, Any]:
    """Write PREFIX.bin, PREFIX.idx, PREFIX.sums, and PREFIX.docs when every pair has one; or
    PREFIX.parts; or a share of PREFIX.bin."""
    manifests, files = stage.manifests, list(stage.inputs["input"].files)
    prefixes = _parts_of(find_pairs(config.entries(), files), files, manifests)
    if config.virtual or config.rank is not None:
        parts = survey_outlines(prefixes, config.multimodal, manifests)
    else:
        parts = survey(prefixes, stage.scratch, config.multimodal, manifests)
    if not any(part.bin_bytes for part in parts):
        raise DataError(
            f"--input {' '.join(config.input)}: no token in any of {len(parts)} pairs, so there is "
            "nothing to train on"
        )
    if config.rank is not None:
        return make_share(config, stage, parts)
    keeps_provenance = not config.drop_provenance and have_provenance(parts, files)
    if config.world_size is not None:
        join_shares(config, stage, parts)
        _write_beside(parts, stage, keeps_provenance)
    elif config.virtual:
        found = parts_list(parts, manifests, keeps_provenance)
        stage.write_bytes(PARTS, found.encode(config.output_prefix + PARTS))
    else:
        _copy(parts, stage, keeps_provenance)
    abort_uploads(config)
    metrics = {
        "pairs": len(parts),
        "documents": sum(part.num_documents for part in parts),
        "sequences": sum(part.num_sequences for part in parts),
        "tokens": sum(part.bin_bytes for part in parts) // parts[0].dtype.itemsize,
    }
    if (vocab_size := metrics_of(f"{prefixes[0]}.bin").get("vocab_size")) is not None:
        metrics["vocab_size"] = vocab_size  # parts of one corpus have one tokenizer
    log.info("merged %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def _parts_of(prefixes: Sequence[str], files: list[str], manifests: Manifests) -> list[str]:
    """The pairs of the prefixes, those of virtual datasets among them; adds their sidecars to
    `files`."""
    known, found = set(files), []
    for prefix in prefixes:
        if f"{prefix}.idx" in known:
            found.append(prefix)
            continue
        parts = [part.prefix for part in read_parts(prefix + PARTS, manifests).parts]
        files += [part + DOCS for part in parts if manifests.lists(part + DOCS)]
        found += parts
    prefix, count = Counter(canonical_each(found)).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"--input names {prefix} twice; its documents would occur twice")
    return found


def _copy(parts: Sequence[TokenPart], stage: StageRun, keeps_provenance: bool) -> None:
    num_bytes = sum(part.bin_bytes for part in parts)
    with stage.progress(num_bytes, "bytes", "merge") as progress, stage.open(".bin") as out:
        sums = BlockDigests(out)
        merge_tokens(parts, out, progress.update)
    with stage.open(SUMS, volatile=True) as out:
        sums.write(out)
    _write_beside(parts, stage, keeps_provenance)


def _write_beside(parts: Sequence[TokenPart], stage: StageRun, keeps_provenance: bool) -> None:
    with stage.open(".idx") as out:
        merge_index(parts, stage.scratch, out)
    if keeps_provenance:
        with stage.open(".docs", volatile=True) as out:
            merge_provenance(parts, out, stage.scratch)
