"""Tasks of an array that make shares of a corpus, and what each reads of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TEXT = "The yard wakes at dawn. " * 9
LINE = json.dumps({"text": TEXT, "score": {"toxicity": 0.1}}).encode() + b"\n"
BLANK = b" " * 4000 + b"\n"
"""Skipped at no cost."""

TAIL = 1 << 16
"""Most bytes that a unit reads of its neighbours, for its first and last line."""


def make_corpus(folder: Path, size_bytes: int) -> Path:
    """A large file and a small one."""
    folder.mkdir()
    piece = LINE + BLANK * 50
    with (folder / "a.jsonl").open("wb") as out:
        for _ in range(size_bytes // len(piece) + 1):
            out.write(piece)
    (folder / "b.jsonl").write_bytes(LINE * 100)
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # settled: its digest is remembered
    return folder


class Tasks:
    """Runs of a stage over a corpus, and what they read of it."""

    def __init__(self, corpus: Path, root: Path, size: int, stage: Sequence[str]) -> None:
        """size: tasks of the array. stage: a program with its options."""
        self._corpus, self._root = corpus, root
        self._size, self._stage = size, stage

    def start(self, log: str, *more: str, kill_at: int = 0) -> subprocess.Popen[bytes]:
        """One run, which writes down its reads."""
        counted = [sys.executable, "-m", "tests.stages.counted_reads", str(self._corpus)]
        line = [*counted, str(self._root / log), str(kill_at), *self._stage, *more]
        return subprocess.Popen(line, stderr=subprocess.DEVNULL)

    def array(self, log: str, ranks: Iterator[int] | range, kill_at: dict[int, int]) -> list[int]:
        """The exit statuses of some tasks of the array, run at the same time."""
        size = ("--world-size", str(self._size))
        tasks = [self.start(log, "--rank", str(r), *size, kill_at=kill_at.get(r, 0)) for r in ranks]
        return [task.wait() for task in tasks]

    def reads(self, log: str) -> dict[Path, list[tuple[int, int]]]:
        """First byte and number of bytes of each read, by file."""
        found: dict[Path, list[tuple[int, int]]] = {p: [] for p in self._corpus.iterdir()}
        path = self._root / log
        for line in path.read_text().splitlines() if path.exists() else ():
            name, start, size = line.rsplit(" ", 2)
            found[Path(name)].append((int(start), int(size)))
        return found


def num_read(reads: list[tuple[int, int]]) -> int:
    """How many bytes of a file were read, each counted once."""
    count = end = 0
    for start, size in sorted(reads):
        count += max(start + size - max(start, end), 0)
        end = max(end, start + size)
    return count


def total(reads: dict[Path, list[tuple[int, int]]]) -> int:
    """Bytes of all reads."""
    return sum(size for some in reads.values() for _, size in some)
