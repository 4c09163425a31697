"""The first pass: the fingerprints of a unit, in a worker."""

from __future__ import annotations

import re

from stages.dedup.config import DedupConfig
from stages.runtime.document_units import UnitDone, UnitJob, reader_of
from trainyard.artifacts import store
from trainyard.collection.duplicates.fingerprints import Fingerprinter
from trainyard.collection.duplicates.minhash import MinHash, Shingler, normalized, one_blank

PARAGRAPH = re.compile(r"(\n[ \t]*\n\s*)")


def pieces(text: str, kind: str) -> list[str]:
    """The lines or paragraphs of a text, and what stands between them at odd places."""
    return PARAGRAPH.split(text) if kind == "paragraph" else re.split(r"(\n)", text)


def name_of(job: UnitJob) -> str:
    """The file of a unit's fingerprints."""
    return f"fingerprints-{job.number:05d}.npz"


def fingerprint_unit(job: UnitJob) -> UnitDone:
    """Write the fingerprints of a unit."""
    config: DedupConfig = job.config
    taker = Fingerprinter(
        config.documents.json_key,
        normalized if config.normalize else one_blank,
        Shingler(config.shingle, config.shingle_size) if config.near else None,
        MinHash.of(config.num_permutations, config.num_bands, config.seed),
        (lambda text: pieces(text, config.lines)[::2]) if config.lines != "none" else None,
        config.min_line_chars,
    )
    reader = reader_of(job)
    for item in reader.items():
        taker.add(item)
    name = name_of(job)
    record = store.write_bytes(store.join(job.folder, name), taker.finish().pack(), name)
    return UnitDone((record,), {})
