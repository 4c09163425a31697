"""A run with damaged old steps trains to its end, and its certificate names the gap."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.stages.pretrain_runs import Pretrain, ledger, manifest
from tests.stages.test_certify import STOPPED, command, link_in
from tests.trainyard.training.run.test_step_ledgers import DAMAGES, other_byte

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(pretrain: Pretrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint 3, and 5 to go on from."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    pretrain(folder, exit_interval=5, expect=STOPPED)
    return folder


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "link"),
    [("another digit", (3, "ledger")), ("another byte", (1, "steps")), ("gone", (1, "steps"))],
)
def test_a_damaged_ledger_of_an_old_step_only_breaks_the_proof(
    pretrain: Pretrain, finished: Path, run: Path, name: str, link: tuple[int, str]
) -> None:
    damage, _ = DAMAGES[name]
    damage(run / "iter_0000003" / "ledger.jsonl")
    log = pretrain(run)
    warned_at = log.index("CANNOT BE PROVEN")
    assert warned_at < log.index("training parameters="), "before the first step"
    assert f"{run}/iter_0000003/ledger.jsonl" in log[:warned_at]
    assert "has a gap at steps 1 to 3" in log[warned_at:]
    for step in ("iter_0000006", "iter_0000008"):
        assert manifest(run / step).output_digest == manifest(finished / step).output_digest
    assert [line["step"] for line in ledger(run)][-5:] == [4, 5, 6, 7, 8]
    found = link_in(run)
    assert (found.step, found.check) == link
    assert command(run).status == 1
    log = pretrain(run)
    assert "nothing to do" in log


def test_damaged_newest_step_is_skipped(pretrain: Pretrain, finished: Path, run: Path) -> None:
    other_byte(run / "iter_0000005" / "ledger.jsonl")
    log = pretrain(run)
    assert "skipping step 5, which is damaged" in log
    assert "resuming from step 3" in log
    assert manifest(run).output_digest == manifest(finished).output_digest


def test_the_only_step_resumes_with_a_damaged_ledger(
    pretrain: Pretrain, finished: Path, run: Path
) -> None:
    shutil.rmtree(run / "iter_0000003")
    other_byte(run / "iter_0000005" / "ledger.jsonl")
    log = pretrain(run)
    assert "resuming from step 5, of which only the ledger is damaged" in log
    last = "iter_0000008"
    model = "model-00001-of-00001.safetensors"
    assert (run / last / model).read_bytes() == (finished / last / model).read_bytes()
    assert [line["step"] for line in ledger(run)] == [4, 6, 7, 8]
    assert link_in(run).check == "steps"


def test_a_torn_step_of_a_finished_run_is_moved_aside(
    pretrain: Pretrain, finished: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "manifest.json").unlink()
    (run / "iter_0000003" / "state.json").write_text("{")
    log = pretrain(run)
    assert "skipping step 3, which is damaged" in log
    assert list(run.glob("superseded/*/iter_0000003/state.json"))
    assert [line["step"] for line in ledger(run)] == [4, 5, 6, 7, 8]
    assert link_in(run)[:2] == (1, "steps")
