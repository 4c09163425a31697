"""A sweep as people and schedules start it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.runner.run_lock import LOCK_FILE
from tests.flows.gc.yards import Corpus, train
from tests.yard.yard import Yard
from trainyard.artifacts.claim import acquire

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

AT_ONCE = ("--keep-corpus-versions", "1", "--corpus-days", "0")

FLOW = """
import asyncio, json, sys
from flows.collect_garbage import collect_garbage
policy = dict(keep_corpus_versions=1, corpus_days=0)
remove = len(sys.argv) > 2
found = asyncio.run(collect_garbage(yard=sys.argv[1], remove=remove, **policy))
print(json.dumps(found))
"""


def test_a_dry_run_then_the_flow_then_nothing(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    yard = Yard(tmp_path, {**prefect_api, "PYTHONPATH": "."})
    root = str(tmp_path / "yard")
    corpus = Corpus(root)
    used, _, _ = (corpus.publish(text) for text in "abc")
    train(f"{root}/gpt", used)

    dry = yard.run("-m", "flows.gc", *AT_ONCE)
    assert dry.status == 0, dry.err
    assert "kept: web/versions/0001-abc: in use by gpt/" in dry.out
    assert "corpus version: " in dry.out
    assert dry.out.splitlines()[-1].endswith("would be removed")

    (tmp_path / "gc.py").write_text(FLOW)
    refreshing = acquire(f"{root}/web/{LOCK_FILE}", 0)
    busy = yard.run(str(tmp_path / "gc.py"), root, "remove")
    refreshing.release()
    assert busy.status == 0, busy.err
    waits = json.loads(busy.out.splitlines()[-1])
    assert {one["kind"] for one in waits["left"]} == {"corpus version", "corpus part"}
    assert waits["failed"] == []

    listed = yard.run(str(tmp_path / "gc.py"), root)
    assert listed.status == 0, listed.err
    assert json.loads(listed.out.splitlines()[-1])["removed"] == 0
    assert "would be removed" in listed.err

    done = yard.run(str(tmp_path / "gc.py"), root, "remove")
    assert done.status == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    kinds = {one["kind"] for one in found["garbage"]} - {"scratch"}
    assert (kinds, found["failed"]) == ({"corpus version", "corpus part"}, [])

    again = yard.run("-m", "flows.gc", "--json", *AT_ONCE)
    assert again.status == 0, again.err
    left = [one for one in json.loads(again.out)["garbage"] if one["kind"] != "scratch"]
    assert left == []
    verified = yard.run("-m", "stages.verify", root)
    assert verified.status == 0, verified.err
    assert "5 artifacts" in verified.out


def test_an_impossible_policy_is_refused_before_any_request(tmp_path: Path) -> None:
    ended = Yard(tmp_path).run("-m", "flows.gc", "--keep-corpus-versions", "0")
    assert ended.status == 2
    assert "--keep-corpus-versions must be at least 1" in ended.err
