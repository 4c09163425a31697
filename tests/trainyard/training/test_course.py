"""A run that goes on under other options in its folder: what may change, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.stages.pretrain_runs import flags
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import (
    RUN,
    certificate,
    check_kills,
    digest,
    go,
    ledger,
)
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint.steps import find_steps
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.options.course import lineage_options
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.run.segments import Course, Segment, parse_segments, segments_of_step

TINY: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 8,
    "global_batch_size": 4,
    "train_iters": 4,
    "save_interval": 3,
    "attention_dropout": 0.1,
    "override_opt_param_scheduler": True,
}

COURSES: dict[str, dict[str, Any]] = {
    "longer": {"train_iters": 7},
    "longer in samples": {"train_iters": None, "train_samples": 28},
    "other rates": {"train_iters": 7, "lr": 0.002, "lr_decay_style": "cosine", "clip_grad": 0.5},
    "another batch size": {"train_iters": 7, "global_batch_size": 8},
    "other validations": {"train_iters": 7, "eval_interval": 2, "eval_iters": 2},
    "skipped steps": {"train_iters": 7, "iterations_to_skip": [6]},
}
EVERY_CHANGE = [
    pytest.param(name, marks=() if number < 1 else pytest.mark.slow)
    for number, name in enumerate(COURSES)
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 60)


@pytest.fixture(scope="module")
def finished(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has all its four steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert go(tokens, folder, **TINY) == "finished"
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a step that the start of the run does not name."""
    names = ("state.json", "ledger.jsonl", "*.safetensors", "tokenizer/*")
    paths = [path for name in names for path in folder.glob(name)]
    assert len(paths) > len(names)
    return {path.name: path.read_bytes() for path in paths}


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


# --- the course may change ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("change", EVERY_CHANGE)
def test_a_run_that_goes_on_equals_load_into_another_folder(
    change: str, tokens: str, run: Path, tmp_path: Path
) -> None:
    options = {**TINY, **COURSES[change]}
    assert go(tokens, tmp_path / "other", **options, load=str(run)) == "finished"
    assert go(tokens, run, **options) == "finished"
    assert find_steps(str(run)) == [3, 4, 6, 7]
    for step in ("iter_0000006", "iter_0000007"):
        assert contents(run / step) == contents(tmp_path / "other" / step)
    assert ledger(run)[4:] == ledger(tmp_path / "other")
    timed = (run / "timings.jsonl").read_text().splitlines()
    assert len(timed) == 7 - len(options.get("iterations_to_skip", ()))
    proof = certificate(run)
    assert proof.is_proven, proof.sentence
    assert proof.is_complete, proof.sentence
    assert [found.first_step for found in proof.course_changes] == [5]


def test_manifest_and_ledger_keep_each_segment_with_its_options(tokens: str, run: Path) -> None:
    go(tokens, run, **{**TINY, "train_iters": 6, "lr": 0.002, "save_interval": None})
    manifest = read_manifest(str(run / "manifest.json"))
    assert manifest is not None
    first, second = parse_segments(manifest[0].run)
    assert (first.first_step, first.last_step, first.course["lr"]) == (1, 4, 0.01)
    assert (second.first_step, second.last_step, second.course["lr"]) == (5, 6, 0.002)
    assert second.schedule["learning_rate"]["decay_steps"] == 24
    entries = {line["step"]: line["course"] for line in ledger(run) if "course" in line}
    changed = {"train_iters": 6, "lr": 0.002}
    assert entries == {5: {"options": changed, "schedule": second.schedule}}


@pytest.mark.slow
def test_options_may_change_between_two_saved_steps(tokens: str, tmp_path: Path) -> None:
    """The last step before the change is temporary: the next one that stays has its lines."""
    save, options = tmp_path / "run", {**TINY, "save_interval": 5, "train_iters": 6}
    assert go(tokens, save, **options, exit_interval=2) == "paused"
    assert go(tokens, save, **options, exit_interval=3, lr=0.002) == "paused"
    assert go(tokens, save, **options, lr=0.003) == "finished"
    assert find_steps(str(save)) == [5, 6]
    segments = segments_of_step(str(save), 5)
    assert [(one.last_step, one.course["lr"]) for one in segments] == [
        (2, 0.01),
        (3, 0.002),
        (5, 0.003),
    ]
    proof = certificate(save)
    assert proof.is_proven, proof.sentence


@pytest.mark.slow
def test_a_change_of_options_that_the_ledger_does_not_state_is_a_broken_link(
    tokens: str, run: Path
) -> None:
    options = {**TINY, "train_iters": 6, "lr": 0.002}
    assert go(tokens, run, **options) == "finished"
    path = run / "iter_0000006/ledger.jsonl"
    path.write_text(path.read_text().replace('"lr": 0.002', '"lr": 0.003'))
    link = certificate(run).first_broken_link
    assert link is not None
    assert (link.step, link.check) == (5, "steps")
    assert (link.expected, link.found) == ("{'lr': 0.002}", "{'lr': 0.003}")


def test_the_schedule_of_a_longer_run_needs_an_option_to_decide(tokens: str, run: Path) -> None:
    longer = {**TINY, "train_iters": 6, "override_opt_param_scheduler": False}
    before = listing(run)
    with pytest.raises(ConfigError, match="--override-opt-param-scheduler to use the options"):
        go(tokens, run, **longer)
    assert listing(run) == before
    assert go(tokens, run, **longer, lr_decay_iters=4) == "finished"
    assert [line["learning_rate"] for line in ledger(run)][4:] == [0.0, 0.0]


@pytest.mark.slow
def test_the_schedule_of_the_checkpoint_may_be_kept(tokens: str, run: Path) -> None:
    options = {**TINY, "override_opt_param_scheduler": False, "train_iters": 6, "lr": 0.5}
    kept = {**options, "use_checkpoint_opt_param_scheduler": True}
    assert go(tokens, run, **kept, exit_interval=5) == "paused"
    assert go(tokens, run, **kept) == "finished"  # the option still decides
    assert [line["learning_rate"] for line in ledger(run)][4:] == [0.0, 0.0]
    entry = ledger(run)[4]["course"]
    assert entry == {"options": {"train_iters": 6, "lr": 0.5}}, "the rates are those before"
    assert certificate(run).is_proven


def test_place_and_speed_never_matter(tokens: str, run: Path) -> None:
    before = (run / "ledger.jsonl").read_bytes()
    other = {"log_interval": 1, "save_interval": 2, "micro_batch_size": 1, "log_throughput": True}
    assert go(tokens, run, **{**TINY, **other}) == "finished"
    assert (run / "ledger.jsonl").read_bytes() == before


# --- what is refused ----------------------------------------------------------------------------


def test_another_model_data_or_seed_is_refused_with_every_difference(
    tokens: str, run: Path, tmp_path: Path
) -> None:
    other, before = write_pair(tmp_path / "other", [60] * 60, 3), listing(run)
    with pytest.raises(ConfigError) as refusal:
        go(other, run, **{**TINY, "hidden_size": 16, "seed": 7, "optimizer": "sgd"})
    for words in (
        f"--save {run} holds another run, which is at step 4: ",
        "--hidden-size is 16 here and 8 there; ",
        "--seed is 7 here and 1234 there",
        "--optimizer is 'sgd' here and 'adam' there",
        "input data_0 has other contents",
        f"give --load {run} and another --save",
        "give --new-run, which moves its steps to superseded/",
    ):
        assert words in str(refusal.value)
    assert listing(run) == before


@pytest.mark.parametrize("change", [{"lr": 0.002}, {"train_iters": 3}])
def test_other_options_are_refused_when_no_step_is_left(
    change: dict[str, Any], tokens: str, run: Path
) -> None:
    before = listing(run)
    with pytest.raises(ConfigError, match="nothing is left to train with other options"):
        go(tokens, run, **{**TINY, **change})
    assert listing(run) == before


@pytest.mark.slow
def test_new_run_replaces_and_is_harmless_when_repeated(tokens: str, run: Path) -> None:
    anew = {**TINY, "seed": 7, "new_run": True}
    assert go(tokens, run, **anew, dies_after=2) == "died"
    assert find_steps(str(run)) == [3, 4], "nothing is moved before the first checkpoint"
    assert go(tokens, run, **anew, dies_after=3) == "died"
    (aside,) = (run / "superseded").iterdir()
    assert (find_steps(str(run)), find_steps(str(aside))) == ([3], [3, 4])
    assert go(tokens, run, **anew) == "finished"
    assert [line["step"] for line in ledger(run)] == [1, 2, 3, 4]
    before = digest(run)
    assert go(tokens, run, **anew) == "finished"
    assert digest(run) == before
    assert len(list((run / "superseded").iterdir())) == 1
    assert certificate(run).is_proven
    assert go(tokens, run, **{**anew, "train_iters": 5}) == "finished"
    assert find_steps(str(run)) == [3, 4, 5], "it goes on, under other options too"


def test_an_option_more_leaves_the_lineage_as_it_is(tmp_path: Path) -> None:
    """Of a later version, whose default is what this one does."""
    given = {**RUN, **TINY, "save": str(tmp_path), "mock_data": True}
    config = from_dict(PretrainConfig, given)
    marks = lineage_options(config)
    assert marks["hidden_size"] == TINY["hidden_size"]
    assert "lr" not in marks, "the course"
    assert "load_optim" not in marks, "at its default"
    assert lineage_options(replace(config, load="x", load_optim=False))["load_optim"] is False


# --- documents ----------------------------------------------------------------------------------


def test_a_segment_grows_while_its_course_stays() -> None:
    course = Course({"lr": 1}, {}, (Segment(1, 4, {"lr": 1}, {}),))
    assert course.up_to(5, 4) == course.before, "no step yet"
    assert course.up_to(5, 6) == (Segment(1, 6, {"lr": 1}, {}),)
    other = Course({"lr": 2}, {}, course.before)
    assert other.up_to(5, 6) == (*course.before, Segment(5, 6, {"lr": 2}, {}))


@pytest.mark.parametrize(
    "segments",
    [
        3,
        [{"first_step": 1}],
        [{"first_step": 1, "last_step": 0, "course": {}, "schedule": {}}],
        [{"first_step": 1, "last_step": 2, "course": [], "schedule": {}}],
        [{"first_step": 1, "last_step": 2, "course": {}, "schedule": {}}] * 2,
    ],
)
def test_invalid_segments_are_refused(segments: object) -> None:
    with pytest.raises(ArtifactError, match="invalid segments"):
        parse_segments({"segments": segments})


# --- kills --------------------------------------------------------------------------------------


@pytest.mark.kill
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "change", [{"train_iters": 7}, {"seed": 7, "new_run": True}, {"on_code_change": "redo"}]
)
def test_a_run_that_goes_on_survives_a_kill_anywhere(
    change: dict[str, Any], tokens: str, finished: Path, tmp_path: Path
) -> None:
    """SIGKILL before the n-th operation of the store, in the run that goes on or starts anew."""
    given = {**RUN, **TINY, **change, "data_path": tokens}
    options = {name: value for name, value in given.items() if value is not False}

    def words(name: str) -> list[str]:
        save = tmp_path / name
        if not save.exists():
            shutil.copytree(finished, save)
            if "on_code_change" in change:
                make_older(save)
        return flags({**options, "save": save})

    check_kills(tmp_path, words, points=8)


def make_older(run: Path) -> None:
    """Make a finished run one of other sources."""
    path = run / "manifest.json"
    document = json.loads(path.read_text())
    document["code"]["digest"] = "0" * 64
    path.write_text(json.dumps(document))
