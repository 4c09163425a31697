"""Check all pairs, then copy them into one."""

from __future__ import annotations

import logging
from typing import Any

from stages.merge.config import MergeConfig
from stages.runtime.context import StageRun
from trainyard.artifacts.inputs import metrics_of
from trainyard.corpus.merge import (
    find_pairs,
    have_provenance,
    merge_index,
    merge_provenance,
    merge_tokens,
    survey,
)
from trainyard.corpus.pairs import SUMS
from trainyard.corpus.sums import BlockDigests
from trainyard.errors import DataError

log = logging.getLogger(__name__)


def run(config: MergeConfig, stage: StageRun) -> dict[str, Any]:
    """Write PREFIX.bin, PREFIX.idx, PREFIX.sums, and PREFIX.docs when every pair has one."""
    files = stage.inputs["input"].files
    prefixes = find_pairs(config.entries(), files)
    parts = survey(prefixes, stage.scratch, config.multimodal)
    if not any(part.bin_bytes for part in parts):
        raise DataError(
            f"--input {' '.join(config.input)}: no token in any of {len(parts)} pairs, so there is "
            "nothing to train on"
        )
    keeps_provenance = not config.drop_provenance and have_provenance(parts, files)
    num_bytes = sum(part.bin_bytes for part in parts)
    with stage.progress(num_bytes, "bytes", "merge") as progress, stage.open(".bin") as out:
        sums = BlockDigests(out)
        merge_tokens(parts, out, progress.update)
    with stage.open(".idx") as out:
        merge_index(parts, stage.scratch, out)
    with stage.open(SUMS, volatile=True) as out:
        sums.write(out)
    if keeps_provenance:
        with stage.open(".docs", volatile=True) as out:
            merge_provenance(parts, out, stage.scratch)
    metrics = {
        "pairs": len(parts),
        "documents": sum(part.num_documents for part in parts),
        "sequences": sum(part.num_sequences for part in parts),
        "tokens": num_bytes // parts[0].dtype.itemsize,
    }
    if (vocab_size := metrics_of(f"{prefixes[0]}.bin").get("vocab_size")) is not None:
        metrics["vocab_size"] = vocab_size  # parts of one corpus have one tokenizer
    log.info("merged %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics
