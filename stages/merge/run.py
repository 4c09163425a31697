"""Check all pairs, then stream them into one."""

from __future__ import annotations

import logging
from typing import Any

from stages.context import StageRun
from stages.merge.config import MergeConfig
from trainyard.corpus.merge import find_pairs, merge_index, merge_tokens, survey

log = logging.getLogger(__name__)


def run(config: MergeConfig, stage: StageRun) -> dict[str, Any]:
    """Write PREFIX.bin and PREFIX.idx."""
    prefixes = find_pairs(stage.inputs["input"].files, config.input)
    parts = survey(prefixes, stage.scratch)
    num_bytes = sum(part.bin_bytes for part in parts)
    with stage.progress(num_bytes, "bytes", "merge") as progress, stage.open(".bin") as out:
        merge_tokens(parts, out, progress.update)
    with stage.open(".idx") as out:
        merge_index(parts, stage.scratch, out)
    metrics = {
        "pairs": len(parts),
        "documents": sum(part.num_documents for part in parts),
        "sequences": sum(part.num_sequences for part in parts),
        "tokens": num_bytes // parts[0].dtype.itemsize,
    }
    log.info("merged %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics
