"""Tasks of an array read each byte of the input once in all, and a killed one loses little.

`TRAINYARD_READS_MB` makes the corpus larger, as docs/scale.md reports it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.stages.array_tasks import TAIL, Tasks, make_corpus, num_read, total
from tests.stages.tokenize_runs import files, manifest
from trainyard.artifacts.block_digest import MARK
from trainyard.corpus.unit_sizes import UNIT_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TASKS = 8
KILLED = (1, 4, 6)
CORPUS_BYTES = (
    int(os.environ.get("TRAINYARD_READS_MB", 0)) * 10**6 or 2 * TASKS * UNIT_BYTES + 12345
)


def test_a_task_that_is_started_twice_reads_its_share_once(tmp_path: Path) -> None:
    """As when a scheduler requeues a task whose node it lost, and which still runs there."""
    corpus = make_corpus(tmp_path / "in", 4 * UNIT_BYTES + 12345)
    stage = ["stages.tokenize", "--input", str(corpus), "--tokenizer-type", "ByteLevelTokenizer"]
    stage += ["--workers", "1", "--output-prefix", str(tmp_path / "out")]
    tasks = Tasks(corpus, tmp_path, 2, [*stage, "--claim-wait-seconds", "600"])
    assert tasks.array("both", iter((0, 0)), {}) == [0, 0]
    assert tasks.array("other", iter((1,)), {}) == [0]
    both, other = tasks.reads("both"), tasks.reads("other")
    assert total(both) > UNIT_BYTES
    size = sum(path.stat().st_size for path in corpus.iterdir())
    units = -(-size // UNIT_BYTES) + len(both)
    assert total(both) + total(other) <= size + 2 * units * TAIL
    assert tasks.start("join", "--world-size", "2").wait() == 0
    assert total(tasks.reads("join")) == 0


def test_tasks_read_each_byte_once_and_a_killed_one_loses_little(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "in", CORPUS_BYTES)
    stage = ["stages.tokenize", "--input", str(corpus), "--tokenizer-type", "ByteLevelTokenizer"]
    prefix, plain = (str(tmp_path / name) for name in ("out", "plain"))
    options = ["--workers", "1", "--output-prefix"]
    tasks = Tasks(corpus, tmp_path, TASKS, [*stage, *options, prefix])
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

    joined = manifest(prefix)
    assert joined.inputs["input"].digest.startswith(MARK)
    assert tasks.start("next").wait() == 0
    assert total(tasks.reads("next")) == 0, "a run without shares finds it made"
    assert manifest(prefix).run == joined.run
    alone = Tasks(corpus, tmp_path, TASKS, [*stage, *options, plain])
    assert alone.start("plain").wait() == 0
    assert files(plain) == files(prefix)
    assert not manifest(plain).inputs["input"].digest.startswith(MARK)
