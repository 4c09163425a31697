"""A step that is not as it was published is passed over; the one before is continued."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainyard.training.small_gpt import TRAINING
from tests.trainyard.training.test_stop_validation import Lines, go_on
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import ArtifactError
from trainyard.training.run.run_steps import (
    FoundSteps,
    find_own_steps,
    finished_steps,
    skip_damaged,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    go_on(folder, replace(TRAINING, save_interval=2), lambda: False, Lines())
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.slow
def test_an_undamaged_run_passes_every_check(run: Path) -> None:
    found = find_own_steps(str(run), "l")
    assert found == FoundSteps((2, 4, 6))
    assert skip_damaged(found, str(run), "sizes") == found
    assert skip_damaged(found, str(run), "digests") == found


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "ledger.jsonl", "state.json"])
def test_each_check_finds_its_kinds_of_damage(
    run: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = run / "iter_0000006" / name
    whole = file.read_bytes()
    found = find_own_steps(str(run), "l")
    file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    passed = skip_damaged(found, str(run), "digests")
    assert passed == FoundSteps((2, 4), damaged=(6,))
    assert "skipping step 6, which is damaged" in caplog.text
    assert name in caplog.text
    file.write_bytes(whole + b" ")
    assert skip_damaged(found, str(run), "sizes").latest == 4
    file.unlink()
    assert skip_damaged(found, str(run), "sizes").latest == 4
    file.write_bytes(whole)
    assert skip_damaged(found, str(run), "digests") == found


@pytest.mark.parametrize("verify", ["none", "sizes", "digests"])
@pytest.mark.parametrize("name", ["state.json", "index.json"])
def test_every_check_finds_a_changed_document(run: Path, name: str, verify: Verify) -> None:
    file = run / "iter_0000006" / name
    file.write_bytes(file.read_bytes().replace(b" ", b"\t", 1))  # of the same meaning, and length
    found = find_own_steps(str(run), "l")
    assert skip_damaged(found, str(run), verify) == FoundSteps((2, 4), damaged=(6,))


@pytest.mark.few_cases(5)
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
@pytest.mark.parametrize("text", ["", "[]", '{"stays"', None], ids=repr)
@pytest.mark.parametrize("step", [2, 6])
def test_a_step_with_torn_documents_is_skipped(
    run: Path, name: str, text: str | None, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = run / f"iter_{step:07d}" / name
    if text is not None:
        file.write_text(text)
    elif name == "manifest.json":  # then it never was a step
        return
    else:
        file.unlink()
    found = find_own_steps(str(run), "l")
    rest = tuple(other for other in (2, 4, 6) if other != step)
    assert found == FoundSteps(rest, damaged=(step,))
    assert skip_damaged(found, str(run), "digests") == found
    assert f"skipping step {step}, which is damaged" in caplog.text
    with pytest.raises(ArtifactError, match="became unreadable"):
        finished_steps(str(run), "l", lambda line: None)


@pytest.mark.slow
def test_if_every_step_is_damaged_none_is_left(tmp_path: Path) -> None:
    go_on(tmp_path, replace(TRAINING, save_interval=2), lambda: False, Lines())
    for step in (2, 4, 6):
        (tmp_path / f"iter_{step:07d}" / "index.json").write_text("{}")
    passed = skip_damaged(find_own_steps(str(tmp_path), "l"), str(tmp_path), "sizes")
    assert passed == FoundSteps(damaged=(2, 4, 6))
    assert passed.latest is None
