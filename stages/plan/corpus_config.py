"""Options of `python -m stages.plan --corpus`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_PROCESSES,
    MAX_RANKS,
    MAX_SAMPLES,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
    flag,
    location,
)
from trainyard.errors import ConfigError

RATES = (
    "start_seconds",
    "tokenize_mb_per_second",
    "output_ratio",
    "machine_mb_per_second",
    "store_mb_per_second",
    "request_milliseconds",
    "requests_per_second",
    "join_mb_per_second",
)
"""Options that replace a rate."""

MAY_BE_ZERO = ("start_seconds", "request_milliseconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlanConfig:
    """Estimate how long 1, 10, 100 and 1,000 machines take to tokenize a corpus, and what limits
    them. From rates of the project's benchmarks, of runs of your own, or given here."""

    corpus: bool = True
    """Plan the preparation of a corpus instead of a training."""
    corpus_gb: float
    """Text of the corpus, in 10^9 bytes; of compressed files, their own size."""
    corpus_files: int = 1
    """Number of its files, taken to be equally large."""
    compressed: bool = False
    """The files are compressed, so that each is one unit of work."""
    machines: tuple[int, ...] = (1, 10, 100, 1000)
    """Numbers of machines to compare."""
    cores: int = 2
    """Cores of a machine."""
    processes: int = 1
    """Processes of a machine that work at the same time."""
    workers: int | None = None
    """Workers of a process; unset: the cores divided by the processes."""
    join: Literal["shares", "merge", "virtual"] = "shares"
    """How the parts become one dataset. shares: each process makes a share of one pair (--rank,
    --world-size), and one process joins them. merge: each file becomes a pair, and one process
    merges them. virtual: the same without a copy (merge --virtual)."""
    shares: int | None = None
    """With --join shares: number of shares; unset: one for each process of all machines."""
    store: Literal["local", "s3"] = "local"
    """Where text and tokens are: a file system that all machines share, or an object store."""
    corpus_measured: tuple[str, ...] = location(())
    """Folders, or manifests (PREFIX.manifest.json), of finished runs of tokenize and merge on a
    machine like those to come: their rates replace the benchmarks'. With two sizes of input, the
    start of a process is told from what each byte takes."""
    start_seconds: float | None = None
    """Processor seconds of a process before its first byte."""
    tokenize_mb_per_second: float | None = None
    """Text that one core tokenizes, in 10^6 bytes a second."""
    output_ratio: float | None = None
    """Bytes of tokens for each byte of text."""
    machine_mb_per_second: float | None = None
    """What one machine reads and writes of the store, together."""
    store_mb_per_second: float | None = None
    """What the store reads and writes for all machines together; unset: no limit."""
    request_milliseconds: float | None = None
    """Time of a request to the store."""
    requests_per_second: float | None = None
    """Requests that the store answers, from all machines together."""
    join_mb_per_second: float | None = None
    """Tokens that the join or the merge copies."""
    json: bool = execution(False)
    """Print one JSON document instead of the table."""
    output_dir: str | None = location(None)
    """Folder or URL for corpus_plan.json; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        sizes = ("corpus_files", "cores", "processes", "workers", "shares")
        check_at_least(self, 1, *sizes)
        check_at_most(self, MAX_SAMPLES, "corpus_gb", "corpus_files")
        check_at_most(self, MAX_PROCESSES, "cores", "processes", "workers")
        check_at_most(self, MAX_RANKS, "shares")
        check_above_zero(self, "corpus_gb", *(name for name in RATES if name not in MAY_BE_ZERO))
        check_at_least(self, 0, *MAY_BE_ZERO)
        self._check_machines()
        if self.shares is not None and self.join != "shares":
            raise ConfigError(
                f"--shares {self.shares} needs --join shares: with --join {self.join}, each file "
                "becomes a pair"
            )

    def _check_machines(self) -> None:
        if not self.machines:
            raise ConfigError("--machines names no number of machines")
        for count in self.machines:
            if not 1 <= count * self.processes <= MAX_RANKS:
                raise ConfigError(
                    f"{flag('machines')} {count} x {flag('processes')} {self.processes}: at least "
                    f"1 and at most {MAX_RANKS:,} processes can be planned"
                )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The measured runs."""
        return {f"measured_{i}": (url,) for i, url in enumerate(self.corpus_measured)}

    def output(self) -> Output | None:
        """The folder of corpus_plan.json."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
