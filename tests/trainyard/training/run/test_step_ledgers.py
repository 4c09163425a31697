"""Damaged ledgers of steps are found and named when a run resumes, and never end it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import digest, go
from tests.trainyard.training.run.test_node_local import SMALL, local, resumes
from tests.trainyard.training.small_gpt import TRAINING
from tests.trainyard.training.test_stop_validation import Lines, contents, go_on
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import ArtifactError
from trainyard.training.loop.ledger import parse_ledger
from trainyard.training.run.run_steps import (
    FoundSteps,
    find_own_steps,
    finished_steps,
    log_found_steps,
    skip_damaged,
)
from trainyard.training.run.step_ledgers import carried_lines, read_ledgers

Damage = Callable[[Path], object]


def other_digit(file: Path) -> None:
    """The JSON of the last line is as good as before."""
    text = file.read_text()
    at = text.rindex('"lm_loss": ') + len('"lm_loss": ')
    file.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def other_byte(file: Path) -> None:
    """The last line is no text any more."""
    data = file.read_bytes()
    file.write_bytes(data[:-9] + b"\xff" + data[-8:])


def nested(file: Path) -> None:
    """The last line is more brackets than a parser takes, in as many bytes."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + b"[" * (len(lines[-1]) - 1) + b"\n")


DAMAGES: dict[str, tuple[Damage, int]] = {
    "another digit": (other_digit, 2),
    "another byte": (other_byte, 1),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-9]), 1),
    "brackets": (nested, 1),
    "gone": (Path.unlink, 0),
}
"""Each with how many of the two lines of a step are left."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4 and 6, all of which stay."""
    folder = tmp_path_factory.mktemp("ledgers") / "run"
    go_on(folder, replace(TRAINING, save_interval=2), lambda: False, Lines())
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4, which stay, and 5, to go on from."""
    folder, looks = tmp_path_factory.mktemp("ledgers") / "run", count(1)
    training = replace(TRAINING, save_interval=2, eval_iters=0)
    assert go_on(folder, training, lambda: next(looks) >= 5, Lines()) == "stopped"
    assert find_own_steps(str(folder), "l") == FoundSteps((2, 4), (5,))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def ledger(run: Path, step: int) -> Path:
    return run / f"iter_{step:07d}" / "ledger.jsonl"


def vouch(run: Path, step: int) -> None:
    """The manifest says what the ledger is now."""
    file = run / f"iter_{step:07d}" / "manifest.json"
    data = ledger(run, step).read_bytes()
    found = read_manifest(str(file))
    assert found is not None
    others = (record for record in found[0].files if record.path != "ledger.jsonl")
    records = (*others, FileRecord("ledger.jsonl", len(data), digest_bytes(data)))
    file.write_text(json.dumps(replace(found[0], files=records).to_document()))


def begin(run: Path, verify: Verify = "sizes") -> FoundSteps:
    """As a run does, before it builds anything."""
    found = skip_damaged(find_own_steps(str(run), "l"), str(run), verify)
    log_found_steps(found, str(run))
    return found


def finish(run: Path, skipped: tuple[int, ...] = ()) -> tuple[list[FileRecord], bytes]:
    """The files of steps that differ from their manifests, and the whole ledger."""
    lines: list[bytes] = []
    found = finished_steps(str(run), "l", lines.append, skipped)
    return found.files, b"".join(lines)


@pytest.mark.slow
def test_a_valid_run_logs_no_warning(
    whole: Path, stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    assert begin(whole) == FoundSteps((2, 4, 6))
    assert begin(stopped, "digests") == FoundSteps((2, 4), (5,))
    assert caplog.text == ""
    text, _ = contents(whole)
    parts = (ledger(whole, step).read_bytes() for step in (2, 4, 6))
    assert text == b"".join(parts)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("step", [2, 4])
def test_damage_in_an_old_step_is_logged_at_the_start_and_the_run_finishes(
    run: Path, name: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    damage, left = DAMAGES[name]
    damage(ledger(run, step))
    assert begin(run) == FoundSteps((2, 4, 6)), "the weights of step 6 are sound"
    first_log = caplog.text
    assert first_log.count("CANNOT BE PROVEN") == 1
    assert f"{ledger(run, step)}: " in first_log
    assert f"that steps {step - 1} to {step} lost and repeated no sample" in first_log
    records, text = finish(run)
    assert f"has a gap at steps {step - 1} to {step}" in caplog.text.removeprefix(first_log)
    lines = [line["step"] for line in parse_ledger(text)]
    assert lines == [s for s in range(1, 7) if s not in (step - 1, step) or s < step - 1 + left]
    # What the run is published with is what is there.
    for record in records:
        data = (run / record.path).read_bytes()
        assert (record.size_bytes, record.digest) == (len(data), digest_bytes(data)), record.path
    listed = {record.path for record in records}
    assert (f"iter_{step:07d}/ledger.jsonl" in listed) == ledger(run, step).exists()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("verify", ["none", "sizes", "digests"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_ledger_skips_the_step_under_every_check(
    run: Path, stopped: Path, name: str, verify: Verify, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[name][0](ledger(run, 6))
    assert begin(run, verify) == FoundSteps((2, 4), damaged=(6,))
    assert "skipping step 6, which is damaged" in caplog.text
    assert str(ledger(run, 6)) in caplog.text
    passing = run.with_name("passing")
    shutil.copytree(stopped, passing)
    DAMAGES[name][0](ledger(passing, 5))
    assert begin(passing, verify) == FoundSteps((2, 4), damaged=(5,))


def test_without_a_whole_step_a_run_resumes_from_one_with_a_damaged_ledger(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4, 6):
        other_byte(ledger(run, step))
    (run / "iter_0000006" / "model-00001-of-00001.safetensors").write_bytes(b"")
    assert begin(run) == FoundSteps((2, 4), damaged=(6,))
    assert "resuming from step 4, of which only the ledger is damaged" in caplog.text
    assert caplog.text.count("CANNOT BE PROVEN") == 2


def test_a_run_with_a_damaged_ledger_ends_as_the_undisturbed(run: Path, tmp_path: Path) -> None:
    sound, digests = contents(run)
    shutil.rmtree(run / "iter_0000006")
    other_byte(ledger(run, 2))
    assert begin(run).latest == 4
    training = replace(TRAINING, save_interval=2)
    assert go_on(run, training, lambda: False, Lines()) == "finished"
    text, again = contents(run)
    assert again == digests, "equal weights, and what each step says of itself"
    assert text.splitlines() == [*sound.splitlines()[:1], *sound.splitlines()[2:]]


def test_lines_that_do_not_chain_from_step_to_step_are_logged(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_digit(ledger(run, 4))
    vouch(run, 4)  # the manifest says so, too
    faults = {found.step: found.fault for found in read_ledgers(str(run), (2, 4, 6))}
    assert (faults[2], faults[6]) == ("", ""), "each is held against what the step before tells"
    assert "do not lead from that of step 2 to the ledger_digest of state.json" in faults[4]
    assert begin(run).latest == 6
    assert "CANNOT BE PROVEN" in caplog.text
    caplog.clear()
    shutil.rmtree(run / "iter_0000004")
    begin(run)
    assert "it starts at step 5, and the one before it ends at 2" in caplog.text


def test_an_unreadable_line_that_matches_its_manifest_is_left_out(run: Path) -> None:
    nested(ledger(run, 4))
    vouch(run, 4)
    _, text = finish(run)
    assert [line["step"] for line in parse_ledger(text)] == [1, 2, 3, 5, 6]


def test_a_ledger_that_is_a_link_is_not_followed(run: Path) -> None:
    ledger(run, 2).unlink()
    (run.parent / "secret").write_text('{"step": 1}\n')
    ledger(run, 2).symlink_to(run.parent / "secret")
    records, text = finish(run)
    assert [line["step"] for line in parse_ledger(text)] == [3, 4, 5, 6]
    assert not [record for record in records if record.path == "iter_0000002/ledger.jsonl"]


def test_lines_without_a_permanent_step_are_carried_over(
    stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = str(stopped / "iter_0000005")
    (line,) = carried_lines(step, 5, 4)
    assert line == ledger(stopped, 5).read_text().splitlines()[-1]
    torn = Path(shutil.copytree(stopped / "iter_0000005", tmp_path / "iter_0000005"))
    other_byte(torn / "ledger.jsonl")
    assert carried_lines(str(torn), 5, 4) == []
    assert "dropped 1 unreadable lines" in caplog.text


@pytest.mark.slow
def test_a_node_local_step_with_a_damaged_ledger_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokens, run, node = write_pair(tmp_path / "t", [60] * 40), tmp_path / "run", tmp_path / "node"
    options = {**SMALL, **local(tmp_path, "node")}
    assert go(tokens, tmp_path / "whole", **SMALL) == "finished"
    assert go(tokens, run, dies_after=6, **options) == "died"
    (file,) = node.glob("*/iter_0000006/ledger.jsonl")
    other_byte(file)
    resumes(tokens, run, caplog, f"resuming from step 4 in {run}", **options)
    assert f"damaged: {file}: digest " in caplog.text
    assert digest(run) == digest(tmp_path / "whole")


# --- other papers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_step_with_torn_documents_does_not_block_the_end_of_a_run(
    run: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "iter_0000002" / name).write_text("{")
    with pytest.raises(ArtifactError, match=r"step 2 became unreadable.* same command again"):
        finish(run)  # since the run has begun
    found = begin(run)
    assert found == FoundSteps((4, 6), damaged=(2,))
    _, text = finish(run, found.damaged)
    assert [line["step"] for line in parse_ledger(text)] == [3, 4, 5, 6]
    assert list(run.glob("superseded/*/iter_0000002/ledger.jsonl")), "set aside, not removed"
