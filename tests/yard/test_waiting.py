"""Two runs of one recipe that wait for its turn: what comes meanwhile is in what both make."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.runner.run_lock import LOCK_FILE
from tests.yard.operator.deployed import comes
from tests.yard.yard import FLOW_SECONDS, Ended, Yard, write_corpus
from trainyard.artifacts.claim import acquire

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(240)]

RECIPE = """
corpus = ["{folder}/docs/*.jsonl"]
evaluation_data = "{folder}/docs/a.jsonl"

[train_tokenizer]
vocab_size = 300
"""


def test_new_file_is_tokenized_once(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    (tmp_path / "docs").mkdir()
    write_corpus(tmp_path / "docs" / "a.jsonl", 60, seed=1)
    recipe = yard.recipe(RECIPE.format(folder=tmp_path))
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    held = acquire(str(yard.tiny / LOCK_FILE), 0)
    flows = [yard.start("-m", "flows.prepare_corpus", recipe, stderr=log.open("w")) for log in logs]
    assert comes(60, lambda: all("another flow run works on" in log.read_text() for log in logs))
    write_corpus(tmp_path / "docs" / "b.jsonl", 60, seed=2)
    held.release()

    outputs = [flow.communicate(timeout=FLOW_SECONDS)[0] for flow in flows]
    ended = [
        Ended(flow.returncode, out, log.read_text(), 0.0)
        for flow, out, log in zip(flows, outputs, logs, strict=True)
    ]
    assert [each.status for each in ended] == [0, 0], [each.err for each in ended]
    made, reused = sorted(ended, key=lambda each: "reused" in each.states().values())
    stages = ("train_tokenizer", "tokenize-a", "tokenize-b", "merge")
    assert made.states() == dict.fromkeys(stages, "done")
    assert reused.states() == dict.fromkeys(stages, "reused"), reused.notes()
