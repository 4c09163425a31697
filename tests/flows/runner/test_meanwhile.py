"""Waiting flow runs use the newest inputs, and no sweep removes them. The stages are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from flows.gc.sweep import sweep
from flows.pages.run_pages import RunPages
from flows.prepare_corpus import prepare_corpus
from flows.pretrain_gpt import pretrain_gpt
from flows.recipes.stage_job import StageJob
from flows.recipes.summary import Summary
from flows.runner import stage_runner
from flows.runner.run_lock import JOBS, LOCK_FILE
from flows.yard.profile import StageEnvironment
from tests.flows.gc.yards import AT_ONCE, Corpus
from tests.flows.recipes.test_recipe import TINY, own, without
from trainyard.artifacts.manifest import FORCE, read_manifest

Waiting = Callable[[], None]


class Stages:
    """In the place of the task: notes the jobs that it is given."""

    def __init__(self) -> None:
        self.ran: list[StageJob] = []
        self.places: list[StageEnvironment] = []

    async def __call__(self, job: StageJob, site: StageEnvironment) -> Summary:
        self.ran.append(job)
        self.places.append(site)
        return Summary(job=job.name, stage=job.stage, reused=False, reason="", seconds=0.0)

    def of(self, stage: str, option: str) -> list[Any]:
        """What an option was, in each job of a stage."""
        return [job.document[option] for job in self.ran if job.stage == stage]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    async def nothing(*_: Any) -> None:
        pass

    done = Stages()
    monkeypatch.setattr(stage_runner, "run_stage_task", done)
    monkeypatch.setattr(stage_runner, "watch_signals", lambda: None)
    for name in ("open", "close"):
        monkeypatch.setattr(RunPages, name, nothing)
    with disable_run_logger():
        yield done


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text("[limits]\npretrain = 1\n")
    return str(tmp_path / "mine.toml")


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> list[Waiting]:
    """What happens while a stage waits for its slot."""
    meanwhile: list[Waiting] = []

    class Limit:
        def __init__(self, tag: str) -> None: ...

        @contextlib.asynccontextmanager
        async def apply(self, *_: Any) -> AsyncIterator[None]:
            for happens in meanwhile:
                await asyncio.to_thread(happens)
            yield

    monkeypatch.setattr(stage_runner, "StageLimit", Limit)
    return meanwhile


def held_out(folder: Path) -> str:
    """The key of a text to evaluate on, which it makes."""
    (folder / "held.txt").write_text("one\n")
    return f'evaluation_data = "{folder}/held.txt"'


def pointed(folder: Path) -> str:
    """A recipe that trains on the newest version of corpus `web`."""
    tokenize = '[tokenize]\ntokenizer_type = "NullTokenizer"\nvocab_size = 500\n[plan]\n'
    rest = without("collect").partition("[plan]")[2]
    above = f'tokens = "{folder}/web/current.json"\n{held_out(folder)}\n'
    (folder / "gpt.toml").write_text(f"{above}{tokenize}vocab_size = 500\n{rest}")
    return str(folder / "gpt.toml")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("first", ["asked earlier", "asked later"])
def test_two_waiting_runs_both_train_on_the_newest_version(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: Stages,
    slot: list[Waiting],
    profile: str,
    first: str,
) -> None:
    corpus, recipe = Corpus(str(tmp_path)), pointed(tmp_path)
    corpus.publish("a")
    asked: list[asyncio.Event] = []

    @contextlib.asynccontextmanager
    async def turn(*_: Any) -> AsyncIterator[None]:
        asked.append(asyncio.Event())
        await asked[-1].wait()
        yield

    monkeypatch.setattr(stage_runner, "run_lock", turn)

    async def both() -> str:
        runs = []
        for night in range(2):
            runs.append(
                asyncio.create_task(pretrain_gpt.fn(recipe, yard=str(tmp_path), profile=profile))
            )
            while len(asked) == night:
                await asyncio.sleep(0.001)
            newest = corpus.publish("a", "bc"[night])
        order = [0, 1] if first == "asked earlier" else [1, 0]
        for number in order:
            asked[number].set()
            await runs[number]
        return newest

    newest = asyncio.run(both())
    assert stages.of("pretrain", "data_path") == [[newest], [newest]]


@pytest.mark.parametrize("flow", [prepare_corpus, pretrain_gpt])
def test_a_file_that_comes_while_a_run_waits_for_its_turn_is_tokenized_and_its_tokens_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: Stages,
    slot: list[Waiting],
    profile: str,
    flow: Any,
) -> None:
    (tmp_path / "tiny.toml").write_text(own(tmp_path, "a.jsonl", evaluation=held_out(tmp_path)))
    kept: list[list[str]] = []

    @contextlib.asynccontextmanager
    async def turn(*_: Any) -> AsyncIterator[None]:
        own(tmp_path, "b.jsonl")
        yield

    monkeypatch.setattr(stage_runner, "run_lock", turn)
    monkeypatch.setattr(stage_runner, "remove_other_parts", kept.append)
    asyncio.run(flow.fn(str(tmp_path / "tiny.toml"), yard=str(tmp_path / "yard"), profile=profile))
    files = [[f"{tmp_path}/a.jsonl"], [f"{tmp_path}/b.jsonl"]]
    assert stages.of("tokenize", "input") == files
    assert stages.of("train_tokenizer", "input") == [[file for (file,) in files]]
    assert [[prefix.rpartition("/")[2] for prefix in parts] for parts in kept] == [["a", "b"]]


def test_recipe_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: Stages) -> None:
    def turn(*_: Any) -> None:
        pytest.fail("it waits for its turn")

    monkeypatch.setattr(stage_runner, "run_lock", turn)
    (tmp_path / "tiny.toml").write_text(TINY.replace("num_shards = 3", "num_shards = 0"))
    for flow in (pretrain_gpt, prepare_corpus):
        state: Any = asyncio.run(flow.fn(str(tmp_path / "tiny.toml"), yard=str(tmp_path)))
        assert state.is_failed()
        assert "num-shards" in state.message


def test_inputs_are_kept(tmp_path: Path, stages: Stages, slot: list[Waiting], profile: str) -> None:
    corpus, recipe = Corpus(str(tmp_path)), pointed(tmp_path)
    used = corpus.publish("a")

    def weeks() -> None:
        for text in "bcd":
            corpus.publish(text)
        done = sweep(str(tmp_path), [], AT_ONCE, remove=True)
        assert "0002-abc" in str(done.removed)
        assert set(done.plan.kept) == {"web/versions/0001-abc"}
        assert f"{tmp_path}/gpt" in done.plan.kept["web/versions/0001-abc"]

    slot.append(weeks)
    asyncio.run(pretrain_gpt.fn(recipe, yard=str(tmp_path), profile=profile))
    assert stages.of("pretrain", "data_path") == [[used]]
    assert read_manifest(f"{used}.manifest.json") is not None
    assert not (tmp_path / "gpt" / JOBS).exists()
    sweep(str(tmp_path), [], AT_ONCE, remove=True)
    assert read_manifest(f"{used}.manifest.json") is None


def test_inputs_of_a_killed_run_are_not_kept(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path))
    used = corpus.publish("a")
    corpus.publish("b")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / JOBS).write_text(json.dumps([{"data_path": [used]}]))
    assert not (tmp_path / "gpt" / LOCK_FILE).exists()
    sweep(str(tmp_path), [], AT_ONCE, remove=True)
    assert read_manifest(f"{used}.manifest.json") is None


def test_only_named_stages_are_forced(tmp_path: Path, stages: Stages, profile: str) -> None:
    """All by one mark, that of the flow run."""
    (tmp_path / "tiny.toml").write_text(TINY)
    where = {"yard": str(tmp_path / "yard"), "profile": profile}
    asyncio.run(prepare_corpus.fn(str(tmp_path / "tiny.toml"), force="tokenize", **where))
    forced = [FORCE in place.environment for place in stages.places]
    assert forced == [job.stage == "tokenize" for job in stages.ran]
    assert len({place.environment.get(FORCE) for place in stages.places}) == 2
