"""Rates of tokenize, join and merge: the benchmarks', or those of finished runs by their manifests.

The defaults come from benchmarks/README.md, which says how each was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from stages.plan.corpus_model import MEGABYTE, Rates
from stages.plan.retro_sample import Line, Point, fit
from stages.runtime.share_digests import SHARES_LINEAGE
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import MANIFEST, PARTS
from trainyard.charts.numbers import is_number
from trainyard.errors import ArtifactError, ConfigError

Join: TypeAlias = Literal["shares", "merge", "virtual"]

TOKENIZED: Sequence[Point] = ((56.0, 1.82), (560.3, 5.61))
"""(MB, seconds) with GPT-2 on two cores ("Corpus, two cores")."""
TOKENIZED_CORES = 2
FILE_SECONDS = 0.053
"""Of a file of a line in a job of many ("Scale", prepare-corpus of 1,000)."""
OUTPUT_RATIO = 0.47
"""GPT-2 on English text, of two bytes a token, with index and origins."""
PROGRAM_SECONDS, DIGEST_SECONDS_PER_MB = 0.5, 0.0006
"""Of a command before the time that its manifest records: its start, and the digest of text that it
reads without shares ("Plan of a corpus")."""
LOCAL_MB, S3_MB = 1800.0, 709.0
"""A second: cp and sync of 2 GB ("Checkpoints"), and reads of a Ceph RGW ("Corpus")."""
S3_REQUEST_SECONDS, S3_REQUESTS = 0.02, 3500.0
"""Not measured: a usual latency, and what Amazon documents for writes below one prefix."""

JOINED = {"shares": Line(1.1, 0.003), "merge": Line(0.3, 0.003), "virtual": Line(0.66, 0.00085)}
"""Seconds of a part, and besides ("Growth": virtual; "Plan of a corpus": shares)."""
JOINED_MB = {"shares": 600.0, "merge": 2000.0 / (1.10 - 0.3), "virtual": math.inf}
"""Copied in a second: "Corpus" (merge of 8 x 250 MB), "Plan of a corpus"."""
JOIN_REQUESTS = {"shares": 34, "merge": 39, "virtual": 21}
"""To an object store for each part (counted with 1 and 3 shares, 1 and 2 pairs)."""


def default_rates(join: Join, kind: Literal["local", "s3"]) -> Rates:
    """Those of the benchmarks."""
    line, is_s3 = fit(TOKENIZED), kind == "s3"
    return Rates(
        start_seconds=line.fixed,
        file_seconds=FILE_SECONDS,
        tokenize_mb_per_second=1 / line.each / TOKENIZED_CORES,
        output_ratio=OUTPUT_RATIO,
        machine_mb_per_second=S3_MB if is_s3 else LOCAL_MB,
        request_seconds=S3_REQUEST_SECONDS if is_s3 else 0.0,
        requests_per_second=S3_REQUESTS if is_s3 else math.inf,
        join_seconds=JOINED[join].fixed,
        join_piece_seconds=JOINED[join].each,
        join_piece_requests=JOIN_REQUESTS[join] if is_s3 else 0,
        join_mb_per_second=JOINED_MB[join],
    )


@dataclass(slots=True)
class Measured:
    """Points of finished runs."""

    tokenized: list[Point] = field(default_factory=list)
    """(MB of text for each worker, seconds)."""
    ratios: list[float] = field(default_factory=list)
    joined: dict[str, list[Point]] = field(default_factory=dict)
    """By the kind of join: (MB written, seconds)."""


def measured_rates(rates: Rates, join: Join, urls: Sequence[str]) -> Rates:
    """The rates with those of the runs in place of the defaults.

    With one size of input, a process starts as long as by default. A joined or merged output gives
    the rate of its copy.

    Raises ConfigError for folders without a run of tokenize that says its workers."""
    found = Measured()
    for url in urls:
        for manifest in _manifests(url):
            _add(found, manifest)
    if not found.tokenized:
        raise ConfigError(
            f"--corpus-measured {' '.join(urls)}: no finished run of tokenize that was made "
            "at once and records its workers; tokenize a part of the corpus without --world-size"
        )
    line = _through(found.tokenized, rates.start_seconds)
    rates = replace(
        rates,
        start_seconds=line.fixed,
        tokenize_mb_per_second=1 / line.each,
        output_ratio=sum(found.ratios) / len(found.ratios),
    )
    if join == "virtual" or join not in found.joined:
        return rates
    copied = _through(found.joined[join], rates.join_seconds)
    return replace(rates, join_seconds=copied.fixed, join_mb_per_second=1 / copied.each)


def _through(points: Sequence[Point], fixed: float) -> Line:
    """The line through points of several sizes; through those of one, with the given start unless
    the run was shorter."""
    line = fit(points)
    if line.fixed or len({size for size, _ in points}) > 1:
        return line
    size, seconds = points[0][0], min(seconds for _, seconds in points)
    return Line(fixed, (seconds - fixed) / size) if seconds > fixed else line


def _manifests(url: str) -> Iterator[Manifest]:
    """Those of finished artifacts in a folder and below it, or the one that is named."""
    urls = [url]
    if not url.endswith(MANIFEST):
        names = sorted(store.list_files(url))
        urls = [store.join(url, name) for name in names if name.endswith(MANIFEST)]
    for one in urls:
        found = read_manifest(one)
        if found is not None:
            yield found[0]


def _add(measured: Measured, manifest: Manifest) -> None:
    written = manifest.size_bytes / MEGABYTE
    if manifest.stage == "merge":
        if not any(record.path.endswith(PARTS) for record in manifest.files):
            measured.joined.setdefault("merge", []).append((written, _seconds(manifest)))
        return
    if manifest.stage != "tokenize":
        return
    if SHARES_LINEAGE in manifest.run:
        measured.joined.setdefault("shares", []).append((written, _seconds(manifest)))
        return
    workers, read = manifest.run.get("workers"), manifest.metrics.get("input_bytes")
    if is_number(workers) and is_number(read) and workers and read:
        megabytes = float(read) / MEGABYTE
        seconds = _seconds(manifest) + DIGEST_SECONDS_PER_MB * megabytes
        measured.tokenized.append((megabytes / float(workers), seconds))
        measured.ratios.append(written / megabytes)


def _seconds(manifest: Manifest) -> float:
    """Of the whole command."""
    value = manifest.run.get("seconds")
    if not is_number(value):
        raise ArtifactError(
            f"a measured run of {manifest.stage} has no seconds in its manifest; run it again"
        )
    return PROGRAM_SECONDS + float(value)
