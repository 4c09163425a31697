"""The quick start in small: from nothing to a run card without a server, then again."""

from __future__ import annotations

import re

import pytest

from tests.yard.yard import COLLECTED, Ended, Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(900)]

STAGES = {
    *("plan", "collect", "train_tokenizer", "tokenize-train-00000", "tokenize-train-00001"),
    *("merge", "pretrain", "export", "reshard", "evaluate", "benchmark", "report"),
}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, module_cache: str) -> Yard:
    return Yard(tmp_path_factory.mktemp("quickstart"), {"TRAINYARD_CACHE": module_cache})


@pytest.fixture(scope="module")
def first(yard: Yard) -> Ended:
    return yard.pretrain(yard.recipe(COLLECTED))


def test_one_command_makes_everything(yard: Yard, first: Ended) -> None:
    assert first.status == 0, first.err
    assert first.states() == dict.fromkeys(STAGES, "done")
    assert set(first.notes().values()) == {"there is no manifest yet"}
    card = yard.tiny / "card.html"
    assert first.out.splitlines()[-1] == card.as_uri()
    assert re.search(r"^validation loss: from \d.\d\d to \d.\d\d nats", first.err, re.MULTILINE)
    assert "<html" in card.read_text()
    made = {path.name for path in yard.tiny.iterdir() if not path.name.startswith(".")}
    made -= {"card.html", "card.manifest.json", "card.summary.json"}
    folders = {"plan", "corpus", "tokenizer", "tokens", "checkpoint", "export", "resharded"}
    assert made == {*folders, "evaluation", "benchmark", "goodput"}


def test_the_console_is_quiet(first: Ended) -> None:
    lines = first.err.splitlines()
    assert len(lines) <= 2 * len(STAGES) + 6, first.err
    assert "Prefect" not in first.err
    assert "\033" not in first.err


@pytest.mark.usefixtures("first")
def test_nothing_is_left_running(yard: Yard) -> None:
    assert yard.wait_until_empty(5) == []


@pytest.mark.usefixtures("first")
def test_again_reuses_every_stage(yard: Yard) -> None:
    again = yard.pretrain(yard.recipe(COLLECTED))
    assert again.status == 0, again.err
    assert again.states() == dict.fromkeys(STAGES, "reused"), again.notes()
    assert again.seconds < 60


@pytest.mark.usefixtures("first")
def test_a_flipped_byte_is_named_by_verify(yard: Yard) -> None:
    shard = yard.tiny / "corpus" / "train-00001.jsonl"
    good = shard.read_bytes()
    shard.write_bytes(good[:1000] + bytes([good[1000] ^ 1]) + good[1001:])
    broken = yard.run("-m", "stages.verify", str(yard.tiny))
    shard.write_bytes(good)
    assert broken.status == 1
    assert str(shard) in broken.out + broken.err
    assert "train-00000" not in broken.out + broken.err
    assert yard.run("-m", "stages.verify", str(yard.tiny)).status == 0


@pytest.mark.usefixtures("first")
def test_forced_stages_run_again_and_the_others_do_not(yard: Yard) -> None:
    forced = yard.pretrain(yard.recipe(COLLECTED), "--force", "pretrain,evaluate")
    assert forced.status == 0, forced.err
    made = {name for name, state in forced.states().items() if state == "done"}
    assert made == {"pretrain", "evaluate"}
    assert {forced.notes()[name] for name in made} == {"the flow run forces it"}
