"""A corpus that grows, by the real flow: only what is new is tokenized, old versions stay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.yard.operator.deployed import Api, comes
from tests.yard.yard import Ended, Yard
from trainyard.artifacts.manifest import read_manifest
from trainyard.corpus.indexed import IndexedDataset

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]

RECIPE = """
corpus = ["{folder}/arrivals/*.jsonl"]

[tokenize]
tokenizer_type = "NullTokenizer"
vocab_size = 300
append_eod = true
"""


REFUSED = """
import sys, flows.cli.flow_commands, prefect.events.schemas.events as schemas
dump = schemas.Event.model_dump

def spoilt(event, **how):
    found = dump(event, **how)
    if event.event == "trainyard.corpus.published":
        del found["resource"]["prefect.resource.id"]  # which the server asks for
    return found

schemas.Event.model_dump = spoilt
sys.exit(flows.cli.flow_commands.flow_main("corpus_refresh", sys.argv[1:]))
"""


def write(folder: Path, name: str, *texts: str) -> None:
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "arrivals").mkdir(exist_ok=True)
    (folder / "arrivals" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def yard(tmp_path: Path, prefect_api: dict[str, str]) -> Yard:
    write(tmp_path, "a", "1 2 3", "4 5")
    write(tmp_path, "b", "6 7")
    return Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})


def refresh(yard: Yard) -> tuple[Ended, dict[str, Any]]:
    done = yard.run("-m", "flows.corpus_refresh", yard.recipe(RECIPE.format(folder=yard.folder)))
    assert done.status == 0, done.err
    pointer: dict[str, Any] = json.loads(Path(done.out.split()[-1]).read_text())
    return done, pointer


def events(api: dict[str, str]) -> list[str]:
    """Versions that were announced to the server."""
    names = {"filter": {"event": {"name": ["trainyard.corpus.published"]}}}
    found = Api(api["PREFECT_API_URL"]).ask("events/filter", names)
    return [event["payload"]["version"] for event in found["events"]]


def test_only_new_sources_make_a_new_version(yard: Yard, prefect_api: dict[str, str]) -> None:
    first, one = refresh(yard)
    stages = {"tokenize-a": "done", "tokenize-b": "done", "merge": "done"}
    assert first.states() == {**stages, "corpus": "done"}

    again, same = refresh(yard)
    assert again.states() == {"corpus": "done"}
    assert "no new sources since" in again.err
    assert same == one

    write(yard.folder, "c", "8 9 10")
    second, two = refresh(yard)
    assert second.states() == {"tokenize-c": "done", "merge": "done", "corpus": "done"}
    assert (two["number"], two["previous"]) == (2, one["version"])
    assert two["announced"]

    for pointer, tokens in ((one, 7 + 3), (two, 10 + 4)):  # with an end for each document
        found = read_manifest(pointer["tokens"]["text"] + ".manifest.json")
        assert found is not None
        assert IndexedDataset(pointer["tokens"]["text"]).num_tokens == tokens
        assert not Path(pointer["tokens"]["text"] + ".bin").exists()  # nothing was copied
    announced = {one["version"], two["version"]}
    assert comes(30, lambda: announced <= set(events(prefect_api)))  # written down in batches


@pytest.mark.full
def test_many_files_share_a_job_and_each_is_made_once(yard: Yard) -> None:
    for number in range(9):
        write(yard.folder, f"many-{number}", f"{number} 1 2")
    recipe = yard.recipe(
        f'evaluation_data = "{yard.folder}/held.txt"\n{RECIPE.format(folder=yard.folder)}'
    )
    (yard.folder / "held.txt").write_text("1 2 3")

    def prepare() -> tuple[list[str], dict[str, Any]]:
        done = yard.run("-m", "flows.prepare_corpus", recipe)
        assert done.status == 0, done.err
        states = done.states()
        merged = read_manifest(str(next(yard.folder.rglob("corpus_text_document.manifest.json"))))
        assert merged is not None
        batches = [state for job, state in states.items() if job.startswith("tokenize-batch-")]
        assert len(batches) + 1 == len(states), "a merge beside them"
        return batches, merged[0].metrics

    batches, metrics = prepare()
    assert batches == ["done"] * 6  # of two files each: 11 in at most 8 jobs
    assert metrics["documents"] == 2 + 1 + 9
    assert prepare() == (["reused"] * 6, metrics)
    write(yard.folder, "many-4", "4 1 2", "5")
    batches, metrics = prepare()
    assert sorted(batches) == ["done", *["reused"] * 5]
    assert metrics["documents"] == 2 + 1 + 10


@pytest.mark.full
def test_the_next_run_announces_the_version(yard: Yard, prefect_api: dict[str, str]) -> None:
    write(yard.folder, "late", "11 12")
    by_hand = replace(yard, environment={"TRAINYARD_CACHE": yard.environment["TRAINYARD_CACHE"]})
    done, alone = refresh(by_hand)
    assert not alone["announced"]
    assert "not announced, because PREFECT_API_URL names no server" in done.err
    assert "announced" not in refresh(yard)[0].err
    assert json.loads(Path(done.out.split()[-1]).read_text()) == {**alone, "announced": True}
    assert comes(30, lambda: events(prefect_api).count(alone["version"]) == 1)
    refresh(yard)
    assert events(prefect_api).count(alone["version"]) == 1


@pytest.mark.full
def test_an_event_that_the_server_does_not_take_is_not_marked_as_sent(yard: Yard) -> None:
    write(yard.folder, "refused", "13 14")
    yard.environment["PYTHONPATH"] = "."
    script = yard.folder / "refused.py"
    script.write_text(REFUSED)
    recipe = yard.recipe(RECIPE.format(folder=yard.folder))
    ended = yard.run(str(script), recipe)
    assert ended.status == 3, ended.err
    assert "Prefect's API at " in ended.err
    pointer = json.loads((yard.tiny / "current.json").read_text())
    assert not pointer["announced"]
    assert refresh(yard)[1]["announced"]


def test_of_two_runs_at_once_one_does_the_work_and_the_other_reuses_it(yard: Yard) -> None:
    recipe = yard.recipe(RECIPE.format(folder=yard.folder))
    both = [yard.start("-m", "flows.corpus_refresh", recipe) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted("no new sources since" in err for _, err in outputs) == [False, True]
    assert sorted("merge" in err for _, err in outputs) == [False, True]
    assert outputs[0][0] == outputs[1][0]
