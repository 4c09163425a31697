"""The first pass: the fingerprints of a unit, in a worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from stages.dedup.config import DedupConfig
from stages.runtime.document_units import UnitDone, UnitJob, reader_of
from trainyard.artifacts import store
from trainyard.collection.duplicates.fingerprints import Fingerprinter
from trainyard.collection.duplicates.minhash import MinHash, Shingler, normalized, one_blank
from trainyard.collection.duplicates.spans import Spans

PARAGRAPH = re.compile(r"(\n[ \t]*\n\s*)")


def pieces(text: str, kind: str) -> list[str]:
    """The lines or paragraphs of a text, and what stands between them at odd places."""
    return PARAGRAPH.split(text) if kind == "paragraph" else re.split(r"(\n)", text)


def numbered(config: DedupConfig) -> Callable[[str], Iterable[tuple[int, str]]] | None:
    """What of a text is compared as --lines says; None: nothing."""
    if config.lines == "none":
        return None
    if config.lines == "words":
        return spans_of(config).selected
    kind, least = config.lines, config.min_line_chars
    return lambda text: (
        (at, line) for at, line in enumerate(pieces(text, kind)[::2]) if len(line.strip()) >= least
    )


def spans_of(config: DedupConfig) -> Spans:
    """What finds and cuts runs of words."""
    return Spans(config.min_run_words, config.normalize)


def name_of(job: UnitJob) -> str:
    """The file of a unit's fingerprints."""
    return f"fingerprints-{job.label}.npz"


def fingerprint_unit(job: UnitJob) -> UnitDone:
    """Write the fingerprints of a unit."""
    config: DedupConfig = job.config
    taker = Fingerprinter(
        config.documents.json_key,
        normalized if config.normalize else one_blank,
        Shingler(config.shingle, config.shingle_size) if config.near else None,
        MinHash.of(config.num_permutations, config.num_bands, config.seed),
        numbered(config),
    )
    reader = reader_of(job)
    for item in reader.items():
        taker.add(item)
    name = name_of(job)
    record = store.write_bytes(store.join(job.folder, name), taker.finish().pack(), name)
    return UnitDone((record,), {}, reader.digests)
