"""Tasks of an array read each byte of the input once in all, and a killed one loses little.

`TRAINYARD_READS_MB` makes the corpus larger, as docs/scale.md reports it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.tokenize_runs import files, manifest
from trainyard.artifacts.block_digest import MARK
from trainyard.corpus.unit_sizes import UNIT_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TASKS = 8
KILLED = (1, 4, 6)
CORPUS_BYTES = (
    int(os.environ.get("TRAINYARD_READS_MB", 0)) * 10**6 or 2 * TASKS * UNIT_BYTES + 12345
)

TAIL = 1 << 16
"""Most bytes that a unit reads of its neighbours, for its first and last line."""

LINE = json.dumps({"text": "The yard wakes at dawn. " * 9}).encode() + b"\n"
BLANK = b" " * 4000 + b"\n"
"""Skipped at no cost."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A large file and a small one."""
    folder = tmp_path / "in"
    folder.mkdir()
    piece = LINE + BLANK * 50
    with (folder / "a.jsonl").open("wb") as out:
        for _ in range(CORPUS_BYTES // len(piece) + 1):
            out.write(piece)
    (folder / "b.jsonl").write_bytes(LINE * 100)
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # settled: its digest is remembered
    return folder


class Tasks:
    """Runs of tokenize over a corpus, and what they read of it."""

    def __init__(self, corpus: Path, root: Path) -> None:
        self._corpus, self._root = corpus, root
        self.prefix = str(root / "out")

    def start(self, log: str, *more: str, kill_at: int = 0) -> subprocess.Popen[bytes]:
        """One run, which writes down its reads."""
        counted = [sys.executable, "-m", "tests.stages.counted_reads", str(self._corpus)]
        stage = ["stages.tokenize", "--input", str(self._corpus), "--output-prefix", self.prefix]
        options = ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", *more]
        line = [*counted, str(self._root / log), str(kill_at), *stage, *options]
        return subprocess.Popen(line, stderr=subprocess.DEVNULL)

    def array(self, log: str, ranks: Iterator[int] | range, kill_at: dict[int, int]) -> list[int]:
        """The exit statuses of some tasks of the array, run at the same time."""
        size = ("--world-size", str(TASKS))
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


def test_tasks_read_each_byte_once_and_a_killed_one_loses_little(
    corpus: Path, tmp_path: Path
) -> None:
    tasks = Tasks(corpus, tmp_path)
    size = sum(path.stat().st_size for path in corpus.iterdir())
    share = size // TASKS
    statuses = tasks.array("first", range(TASKS), dict.fromkeys(KILLED, share * 3 // 4))
    assert [rank for rank, status in enumerate(statuses) if status] == list(KILLED)
    assert {statuses[rank] for rank in KILLED} == {-signal.SIGKILL}
    first = tasks.reads("first")
    units = -(-size // UNIT_BYTES) + len(first)
    assert total(first) - sum(map(num_read, first.values())) <= units * TAIL

    assert tasks.array("again", iter(KILLED), {}) == [0] * len(KILLED)
    again = tasks.reads("again")
    both = {path: first[path] + again[path] for path in first}
    assert all(num_read(both[path]) == path.stat().st_size for path in both)
    lost = total(both) - size
    assert lost <= len(KILLED) * UNIT_BYTES + 2 * units * TAIL

    assert tasks.start("join", "--world-size", str(TASKS)).wait() == 0
    assert total(tasks.reads("join")) == 0
    print(f"corpus {size} bytes; read {total(first)}, again {total(again)}, by the join 0")

    joined = manifest(tasks.prefix)
    assert joined.inputs["input"].digest.startswith(MARK)
    assert (
        tasks.start(
            "next",
        ).wait()
        == 0
    )
    assert total(tasks.reads("next")) == 0, "a run without shares finds it made"
    assert manifest(tasks.prefix).run == joined.run
    made = files(tasks.prefix)
    tasks.prefix = str(tmp_path / "plain")
    assert tasks.start("plain").wait() == 0
    assert files(tasks.prefix) == made
    assert not manifest(tasks.prefix).inputs["input"].digest.startswith(MARK)
