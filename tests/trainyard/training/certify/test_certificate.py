"""Certificates of made-up runs: sound ones are proven, and any change is the first broken link."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainyard.training.fabricated_runs import (
    FP16,
    OPTIMIZER,
    TRAINING,
    MadeRun,
    digest_of,
)
from trainyard.errors import ArtifactError
from trainyard.training.certify.certificate import CHECKS, Certificate, Check, Link
from trainyard.training.certify.proof import Prover
from trainyard.training.loop.seeds import digest_of_every_seed
from trainyard.training.loop.state import TrainState
from trainyard.training.run.dp_history import DpSpan
from trainyard.training.run.run_record import PublishedStep, start_before

STEPS = 12
RUNS = {
    "plain": MadeRun(),
    "measured at the start": MadeRun(training=replace(TRAINING, eval_at_start=True)),
    "fp16 that overflows": MadeRun(precision=FP16, overflows=(1, 2, 7)),
    "passed over": MadeRun(training=replace(TRAINING, iterations_to_skip=(4, 5))),
    "other layouts": MadeRun(spans=(DpSpan(1, 4, 2, 2), DpSpan(5, 7, 1, 4), DpSpan(8, 12, 1, 1))),
    "weight decay that grows": MadeRun(
        optimizer=replace(
            OPTIMIZER,
            start_weight_decay=0.0,
            end_weight_decay=0.1,
            weight_decay_incr_style="cosine",
            decoupled_lr=0.02,
        )
    ),
    "a batch that grows": MadeRun(
        training=replace(
            TRAINING,
            train_iters=None,
            train_samples=76,
            rampup_batch_size=(4, 4, 20),
            global_batch_size=8,
        ),
        optimizer=replace(OPTIMIZER, lr_warmup_iters=0, lr_warmup_samples=8),
    ),
}


@st.composite
def saves(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Steps that stay, up to the last, and steps that only serve to go on from."""
    staying = draw(st.sets(st.integers(1, STEPS - 1))) | {STEPS}
    passing = draw(st.sets(st.integers(1, STEPS - 1))) - staying
    return sorted(staying), sorted(passing)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=15)
@given(saved=saves())
def test_a_valid_run_is_proven_for_any_saved_steps(
    name: str, saved: tuple[list[int], list[int]]
) -> None:
    made = RUNS[name]
    assert made.facts.length(made.facts.courses[0]).steps == STEPS
    found = made.certify(made.published(*saved))
    assert found.is_proven, found.sentence
    assert found.is_complete
    assert (found.first_step, found.last_step, found.of_steps) == (1, STEPS, STEPS)
    assert [check.name for check in found.checks] == list(CHECKS)
    assert all(check.result == "proven" for check in found.checks)
    assert found.published_steps == tuple(sorted([*saved[0], *saved[1]]))
    whole = made.certify(made.published([STEPS]))
    assert found.ledger_digest == whole.ledger_digest, "saving is not seen in the ledger"


# --- broken links -------------------------------------------------------------------------------

Lines = list[dict[str, Any]]
Change = Callable[[Lines], object]


def changed(
    published: list[PublishedStep], change: Change, chained: bool = False
) -> list[PublishedStep]:
    """One checkpoint with all lines, changed; with `chained`, its digest is made to fit."""
    (one,) = published
    lines = [json.loads(line) for line in one.lines]
    change(lines)
    texts = tuple(json.dumps(line) for line in lines)
    state = dict(one.state)
    if chained:
        prover = Prover(MadeRun().facts, MadeRun().beginning)
        prover.add(replace(one, lines=texts))
        state["ledger_digest"] = prover.certificate(Check("files")).ledger_digest
    return [replace(one, lines=texts, state=state)]


def first_link(published: list[PublishedStep], **options: Any) -> Link:
    link = MadeRun().certify(published, **options).first_broken_link
    assert link is not None
    return link


def link_after(change: Change, chained: bool = False) -> Link:
    return first_link(changed(MadeRun().published([STEPS]), change, chained))


FIELDS = {
    "consumed_train_samples": "position",
    "tokens": "position",
    "global_batch_size": "position",
    "samples": "samples",
    "rng": "rng",
    "learning_rate": "rates",
    "weight_decay": "rates",
}


@pytest.mark.parametrize("name", FIELDS)
@settings(max_examples=10)
@given(step=st.integers(1, STEPS))
def test_a_change_in_a_line_is_found_at_its_step(name: str, step: int) -> None:
    def change(lines: Lines) -> None:
        value = lines[step - 1][name]
        lines[step - 1][name] = f"{value}x" if isinstance(value, str) else value * 1.001 + 1

    link = link_after(change, chained=True)
    assert (link.step, link.check) == (step, FIELDS[name])
    assert link.expected != link.found
    assert f"step {step}, {FIELDS[name]} (iter_0000012): expected" in link.text


def test_seeds_are_proven_in_lines_of_earlier_versions() -> None:
    def older(lines: Lines, seed: int = TRAINING.seed) -> None:
        for line in lines[:7]:
            line["rng"] = digest_of_every_seed(seed, line["step"], line["global_batch_size"] // 2)

    (one,) = MadeRun().published([STEPS])
    assert len({json.loads(line)["rng"] for line in one.lines}) == STEPS
    assert MadeRun().certify(changed([one], older, chained=True)).is_complete
    link = link_after(lambda lines: older(lines, TRAINING.seed + 1), chained=True)
    assert (link.step, link.check) == (1, "rng")


def test_a_change_that_breaks_no_rule_breaks_the_digest() -> None:
    link = link_after(lambda lines: lines[6].update(lm_loss=1.0))
    assert (link.step, link.check) == (STEPS, "ledger")


@given(step=st.integers(1, STEPS - 1))
@settings(max_examples=10)
def test_a_missing_or_repeated_step_is_the_first_broken_link(step: int) -> None:
    link = link_after(lambda lines: lines.pop(step - 1))
    assert link[:4] == (step, "steps", f"step {step}", f"step {step + 1}")
    link = link_after(lambda lines: lines.insert(step + 1, lines[step - 1]))
    assert link[:2] == (step, "steps")


def test_steps_repeated_over_two_checkpoints_are_found() -> None:
    first, second = MadeRun().published([5, STEPS])
    both = replace(second, lines=(*first.lines[-2:], *second.lines))
    assert first_link([first, both])[:4] == (4, "steps", "step 6", "step 4")


def test_a_checkpoint_that_is_missing_leaves_a_gap() -> None:
    first, _, last = MadeRun().published([3, 7, STEPS])
    found = MadeRun().certify([first, last])
    assert found.first_broken_link is not None
    assert found.first_broken_link[:4] == (4, "steps", "step 4", "step 8")
    assert not found.is_complete
    assert {c.reason for c in found.checks if c.name in ("samples", "rng", "state")} == {
        "not checked after step 3"
    }


def test_two_checkpoints_must_have_the_same_line_for_a_step() -> None:
    passing, staying = MadeRun().published([STEPS], [4])
    line = json.loads(passing.lines[1])
    lines = (passing.lines[0], json.dumps({**line, "lm_loss": 0.5}), *passing.lines[2:])
    links = [first_link([replace(passing, lines=lines), staying])]
    links.append(first_link([passing, replace(staying, lines=(*lines, *staying.lines[4:]))]))
    assert {(link.step, link.check) for link in links} == {(2, "steps")}


@pytest.mark.parametrize(
    "name", ["consumed_train_samples", "scheduled_samples", "num_updates", "seed", "step"]
)
def test_a_checkpoint_that_is_not_at_its_step_is_found(name: str) -> None:
    first, last = MadeRun().published([6, STEPS])
    state = {**first.state, name: first.state[name] + 1}
    link = first_link([replace(first, state=state), last])
    assert (link.step, link.check, link.where) == (6, "state", "iter_0000006")
    assert link.expected == f"{{'{name}': {first.state[name]}}}"


def test_a_wrong_loss_scale_is_found() -> None:
    made = MadeRun(precision=FP16, overflows=(1, 2, 7))
    other = replace(made, overflows=(1, 2, 8))

    def hidden(step: PublishedStep) -> PublishedStep:
        lines = [json.loads(line) for line in step.lines]
        lines[6].pop("skipped")
        return replace(step, lines=tuple(map(json.dumps, lines)))

    link = made.certify([hidden(step) for step in made.published([STEPS])]).first_broken_link
    assert link is not None
    assert (link.step, link.check) == (8, "rates")  # as if the step had been taken
    first, _ = made.published([6, STEPS])
    _, last = other.published([6, STEPS])
    assert other.certify([first, last]).is_proven  # overflows are what they are
    state = {**first.state, "loss_scaler": {**first.state["loss_scaler"], "scale": 2.0}}
    link = made.certify([replace(first, state=state), last]).first_broken_link
    assert link is not None
    assert link.expected.startswith("{'loss_scaler'")


def test_a_missing_or_misplaced_validation_is_found() -> None:
    left_out = link_after(lambda lines: lines[4].pop("validation_loss"))
    assert (left_out.step, left_out.check) == (5, "validation")
    elsewhere = link_after(lambda lines: lines[2].update(validation_loss=1.0))
    assert (elsewhere.step, elsewhere.check) == (3, "validation")


def test_a_pending_validation_is_not_a_broken_link() -> None:
    stopped, last = MadeRun().published([STEPS], [5])
    *before, pending = stopped.lines
    record = json.loads(pending)
    del record["validation_loss"]
    state = {**stopped.state, "unmeasured": record}
    earlier = MadeRun().published([STEPS], [4])[0]
    state["ledger_digest"] = earlier.state["ledger_digest"]
    found = MadeRun().certify([replace(stopped, lines=tuple(before), state=state), last])
    assert found.is_proven, found.sentence
    alone = MadeRun().certify([replace(stopped, lines=tuple(before), state=state)])
    assert alone.is_proven
    assert alone.last_step == 4


def test_a_finished_run_has_all_steps_and_one_ledger() -> None:
    made = MadeRun()
    steps = made.published([4, STEPS])
    text = "".join(f"{line}\n" for step in steps for line in step.lines)
    for end, whole, check in ((2, text, None), (2, text + "{}\n", "ledger"), (1, "", "steps")):
        prover = Prover(replace(made.facts, finished=True), made.beginning, digest_of)
        for step in steps[:end]:
            prover.add(step)
        if whole:
            prover.whole_ledger(whole.encode(), "ledger.jsonl")
        link = prover.certificate(Check("files", checked=1)).first_broken_link
        assert (link and link.check) == check
        assert check != "steps" or (link and link.step) == 5


# --- what it begins at --------------------------------------------------------------------------


def joined() -> tuple[MadeRun, MadeRun]:
    """A run, and one that went on from its fifth step."""
    before = MadeRun(precision=FP16, overflows=(2,))
    state = TrainState()
    state.load_state_dict(dict(before.published([5])[0].state))
    return before, replace(before, begin=state)


def test_a_run_continues_the_ledger_of_the_run_that_it_loaded() -> None:
    before, after = joined()
    found = after.certify(after.published([8, STEPS]))
    assert found.is_proven, found.sentence
    assert (found.first_step, found.last_step) == (6, STEPS)
    assert found.ledger_digest == before.certify(before.published([STEPS])).ledger_digest
    wrong = replace(after.begin, ledger_digest="00")
    link = after.certify(
        after.published([8, STEPS]), beginning=replace(after, begin=wrong).beginning
    ).first_broken_link
    assert link is not None
    assert (link.step, link.check) == (8, "ledger")


def test_without_the_loaded_run_less_is_proven() -> None:
    _, after = joined()
    steps = after.published([8, STEPS])
    guess = start_before(steps[0], "not at hand")
    assert guess.position == after.beginning.position
    found = after.certify(steps, beginning=guess)
    assert found.is_proven, found.sentence
    assert [check.name for check in found.checks if check.reason] == ["ledger", "state"]
    assert "not all checked: ledger and state" in found.sentence
    link = after.certify([steps[0], replace(steps[1], lines=steps[1].lines[1:])])
    assert link.first_broken_link is not None
    assert link.first_broken_link.step == 9


# --- what cannot be checked ---------------------------------------------------------------------


def test_samples_that_cannot_be_computed_are_reported_as_not_checked() -> None:
    steps = MadeRun().published([STEPS])
    found = MadeRun().certify(steps, samples=None, why_no_samples="data not available")
    assert found.is_proven
    assert not found.is_complete
    (samples,) = (check for check in found.checks if check.name == "samples")
    assert (samples.result, samples.checked, samples.reason) == (
        *("not checked", 0, "data not available"),
    )
    found = MadeRun().certify(steps, samples=lambda step, before, size: None)
    assert "not all checked: samples" in found.sentence


def test_check_every_checks_only_every_nth_step() -> None:
    found = MadeRun().certify(MadeRun().published([STEPS]), every=5)
    counts = {check.name: check.checked for check in found.checks}
    assert (counts["samples"], counts["rng"], counts["rates"]) == (2, 2, STEPS)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "{}", '{"step": -1}', '{"step": "1"}', '{"step": 1.0}']
)
def test_an_invalid_line_of_a_ledger_is_named(text: str) -> None:
    (step,) = MadeRun().published([STEPS])
    with pytest.raises(ArtifactError, match=r"iter_0000012: a line of the ledger is not a step"):
        MadeRun().certify([replace(step, lines=(text, *step.lines))])


def test_the_document_and_the_sentence_agree() -> None:
    steps = MadeRun(spans=(DpSpan(1, STEPS, 2, 2),)).published([STEPS])
    sound = MadeRun(spans=(DpSpan(1, STEPS, 2, 2),)).certify(steps).document()
    assert json.loads(json.dumps(sound, allow_nan=False)) == sound
    assert (sound["verdict"], sound["complete"]) == ("proven", True)
    assert sound["spans"] == [
        {"first_step": 1, "last_step": STEPS, "data_parallel_size": 2, "micro_batch_size": 2}
    ]
    broken: Certificate = MadeRun().certify(
        changed(steps, lambda lines: lines[3].update(rng="00"), chained=True)
    )
    document = broken.document()
    assert document["verdict"] == "broken"
    assert document["first_broken_link"]["step"] == 4
    assert broken.sentence.startswith("broken: step 4, rng (iter_0000012): expected ")
