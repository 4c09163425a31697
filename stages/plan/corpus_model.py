"""How long this many machines take to prepare a corpus, and what limits them. Pure arithmetic.

Three phases follow each other: every process starts, looks at the input and plans its units; all
tokenize; one process joins the parts. While they tokenize, cores, the machines' access to the store
and the store itself work side by side, so the slowest of them sets the time. Work comes in pieces
(shares, or files) and these in units, as `trainyard.corpus.units` cuts them: cores without a unit
wait, which counts as time of `shares`, `files` or `units`.

Not modelled: text in fewer or longer documents than measured, files of unequal size, merges in
shares, failures, and what else the machines do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainyard.corpus.unit_sizes import LOOKING_AT_ONCE, unit_bytes_for

MEGABYTE = 1e6

UNIT_REQUESTS = 4
SHARE_REQUESTS = 55
LOOK_REQUESTS = 2
"""To an object store: of a unit, of a share or file besides, and of each share for each file of the
input (counted with a store on this machine: shares of 1, 2 and 6 units, inputs of 1 and 20
files)."""
PLAN_UNIT_SECONDS = 7e-6
"""Each share plans all units (10,000 shares of 100 GB, an AMD EPYC)."""
WRITTEN_TWICE = 2
"""Tokens are written in units and then in the final file of the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine and its store do in a second."""

    start_seconds: float
    """Processor time of a process before its first byte."""
    file_seconds: float
    """Processor time of a further file in the same process, beside that of its bytes."""
    tokenize_mb_per_second: float
    """Of a core."""
    output_ratio: float
    """Bytes written for each byte of text: tokens, index and origins."""
    machine_mb_per_second: float
    store_mb_per_second: float = math.inf
    request_seconds: float = 0.0
    requests_per_second: float = math.inf
    join_seconds: float
    """Of a join without any part; of a merge likewise."""
    join_piece_seconds: float
    """Of a part."""
    join_piece_requests: int = 0
    join_mb_per_second: float
    """Infinite: nothing is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The input."""

    size_bytes: float
    num_files: int = 1
    whole_files: bool = False
    """A file is one unit, as a compressed one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who works, and how the work is handed out."""

    machines: int
    cores: int
    processes: int = 1
    """Of a machine."""
    workers: int = 1
    """Of a process."""
    shares: int | None = None
    """Pieces of the whole input; None: each file is a piece."""

    @property
    def slots(self) -> int:
        """Pieces that are worked on at the same time."""
        return self.machines * self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A preparation."""

    machines: int
    pieces: int
    units: int
    start_seconds: float
    work_seconds: float
    join_seconds: float
    lost: dict[str, float]
    """Seconds by what they are lost to; `work_seconds` counts once, as its slowest resource."""

    @property
    def seconds(self) -> float:
        """From the start of the first process to the dataset."""
        return self.start_seconds + self.work_seconds + self.join_seconds

    @property
    def bottleneck(self) -> str:
        """What most of the time is lost to."""
        return max(self.lost, key=lambda name: self.lost[name])


def forecast(corpus: Corpus, fleet: Fleet, rates: Rates) -> Forecast:
    """What it takes."""
    cut = _Cut.of(corpus, fleet)
    waits = _working(corpus, fleet, rates, cut)
    slowest = max(waits, key=lambda name: waits[name])
    lost = {slowest: waits[slowest]}
    if slowest == "CPU":
        lost = _idle_cores(corpus, fleet, rates, cut)
    start = _starting(corpus, fleet, rates, cut)
    join = _joining(corpus, rates, cut)
    return Forecast(
        machines=fleet.machines,
        pieces=cut.pieces,
        units=cut.units,
        start_seconds=start,
        work_seconds=waits[slowest],
        join_seconds=join,
        lost=lost | {"start": start, "join": join},
    )


# --- pieces and units -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """A corpus of equal files, cut into units, and these into pieces."""

    pieces: int
    units: int
    """Of all pieces."""
    unit_bytes: float
    slots: int
    are_files: bool

    @staticmethod
    def of(corpus: Corpus, fleet: Fleet) -> _Cut:
        """The cut that `plan_units` and `share_of` make."""
        pieces = fleet.shares or corpus.num_files
        num_files, size = corpus.num_files, corpus.size_bytes
        if fleet.shares is None:  # a run for each file
            num_files, size = 1, size / corpus.num_files
        units, unit_bytes = _units(size, num_files, corpus.whole_files, fleet.shares)
        count = units * (1 if fleet.shares else pieces)
        return _Cut(pieces, count, unit_bytes, fleet.slots, fleet.shares is None)

    @property
    def turns(self) -> int:
        """Most pieces that a process works on, one after another."""
        return math.ceil(self.pieces / self.slots)

    @property
    def units_a_piece(self) -> int:
        """Most units of a piece."""
        return math.ceil(self.units / self.pieces)


def _units(
    size_bytes: float, num_files: int, whole_files: bool, world_size: int | None
) -> tuple[int, float]:
    """Number of units, and the bytes of one, of equal files."""
    most = unit_bytes_for(math.ceil(size_bytes), world_size=world_size)
    file_bytes = size_bytes / num_files
    if file_bytes >= most:
        each = 1 if whole_files else math.ceil(file_bytes / most)
        return num_files * each, file_bytes if whole_files else most
    together = min(math.floor(most / file_bytes), num_files)
    return math.ceil(num_files / together), together * file_bytes


# --- phases ---------------------------------------------------------------------------------------


def _starting(corpus: Corpus, fleet: Fleet, rates: Rates, cut: _Cut) -> float:
    """Seconds until the slowest process has all its starts behind it."""
    at_once = min(fleet.processes, math.ceil(cut.pieces / fleet.machines))
    crowded = max(1.0, at_once / fleet.cores)
    if cut.are_files:
        own = rates.start_seconds + cut.turns * rates.file_seconds
        return crowded * own + cut.turns * SHARE_REQUESTS * rates.request_seconds
    planning = PLAN_UNIT_SECONDS * cut.units
    looks = LOOK_REQUESTS * corpus.num_files / LOOKING_AT_ONCE
    waiting = (SHARE_REQUESTS + looks) * rates.request_seconds
    return cut.turns * (crowded * (rates.start_seconds + planning) + waiting)


def _working(corpus: Corpus, fleet: Fleet, rates: Rates, cut: _Cut) -> dict[str, float]:
    """Seconds that each resource needs for all units, without the others."""
    moved = corpus.size_bytes * (1 + WRITTEN_TWICE * rates.output_ratio) / MEGABYTE
    busy = min(fleet.machines, cut.pieces)
    requests = UNIT_REQUESTS * cut.units + SHARE_REQUESTS * cut.pieces
    if not cut.are_files:
        requests += LOOK_REQUESTS * corpus.num_files * cut.pieces
    return {
        "CPU": sum(_idle_cores(corpus, fleet, rates, cut).values()),
        "bandwidth of a machine": moved / busy / rates.machine_mb_per_second,
        "bandwidth of the store": moved / rates.store_mb_per_second,
        "requests": requests / rates.requests_per_second,
    }


def _idle_cores(corpus: Corpus, fleet: Fleet, rates: Rates, cut: _Cut) -> dict[str, float]:
    """Seconds that the cores compute: with all of them at work, the rest of the last round of
    pieces, and the rest of the last round of units in a piece."""
    speed = MEGABYTE * rates.tokenize_mb_per_second
    working = min(fleet.cores, fleet.processes * fleet.workers)
    ideal = corpus.size_bytes / (fleet.machines * working * speed)
    at_once = min(fleet.processes, math.ceil(cut.pieces / fleet.machines))
    computing = at_once * fleet.workers
    worker = speed * min(1.0, fleet.cores / computing)
    evenly = cut.turns * corpus.size_bytes / cut.pieces / (fleet.workers * worker)
    rounds = math.ceil(cut.units_a_piece / fleet.workers)
    most = corpus.size_bytes / (cut.pieces if cut.are_files else 1)
    whole = cut.turns * min(rounds * cut.unit_bytes, most) / worker
    pieces = "files" if cut.are_files else "shares"
    return {
        "CPU": ideal,
        pieces: max(evenly - ideal, 0.0),
        "units": max(whole - max(evenly, ideal), 0.0),
    }


def _joining(corpus: Corpus, rates: Rates, cut: _Cut) -> float:
    """Seconds of the process that makes one dataset of the parts; a part alone is one."""
    if cut.pieces == 1:
        return 0.0
    written = corpus.size_bytes * rates.output_ratio / MEGABYTE
    requests = rates.join_piece_requests * cut.pieces
    copying = 0.0
    if rates.join_mb_per_second < math.inf:
        link = min(rates.machine_mb_per_second, rates.store_mb_per_second)
        copying = max(written / rates.join_mb_per_second, 2 * written / link)
    each = max(rates.request_seconds / LOOKING_AT_ONCE, 1 / rates.requests_per_second)
    waiting = requests * each
    return rates.join_seconds + rates.join_piece_seconds * cut.pieces + copying + waiting
