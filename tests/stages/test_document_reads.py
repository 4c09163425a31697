"""Shares of stages from documents to documents read each byte once in all, also for its digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stages.array_tasks import TAIL, Tasks, make_corpus, num_read, total
from trainyard.artifacts.block_digest import MARK
from trainyard.corpus.unit_sizes import UNIT_BYTES

pytestmark = pytest.mark.slow

TASKS = 3
STAGES = {
    "clean": (["--input", "{}", "--rules", "min_words:limit=2"], 0),
    "collect": (["--source", "json", "--input", "{}"], 0),
    "dedup": (["--input", "{}"], 1),
    "decontaminate": (["--input", "{}", "--tasks", "t", "--task-data", "{}.tasks.jsonl"], 1),
    "mix": (["--sources", "web", "--input", "{}", "--epochs", "1"], 1),
    "score": (["--input", "{}", "--classifier", "annotated", "--attribute", "toxicity"], 1),
}
"""Options, and how often the join reads the documents."""


@pytest.mark.parametrize("stage", STAGES)
def test_shares_read_each_byte_once(stage: str, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "in", TASKS * UNIT_BYTES + 12345)
    (tmp_path / "in.tasks.jsonl").write_text(
        json.dumps({"text": "the signal at the yard " * 20}) + "\n"
    )
    options, passes = STAGES[stage]
    words = [word.format(corpus) for word in options]
    folder = ["--output-dir", str(tmp_path / "out"), "--workers", "1"]
    tasks = Tasks(corpus, tmp_path, TASKS, [f"stages.{stage}", *words, *folder])
    size = sum(path.stat().st_size for path in corpus.iterdir())
    units = -(-size // UNIT_BYTES) + 2
    assert tasks.array("shares", range(TASKS), {}) == [0] * TASKS
    shares = tasks.reads("shares")
    assert all(num_read(reads) == path.stat().st_size for path, reads in shares.items())
    assert total(shares) <= size + 2 * units * TAIL
    assert tasks.start("join", "--world-size", str(TASKS)).wait() == 0
    assert total(tasks.reads("join")) <= passes * (size + units * TAIL)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    (digest,) = (one["digest"] for name, one in manifest["inputs"].items() if "task" not in name)
    assert digest.startswith(MARK)
    assert tasks.start("again").wait() == 0
    assert total(tasks.reads("again")) == 0
