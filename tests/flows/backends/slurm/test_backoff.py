"""The Slurm block at a queue that takes no more jobs, or belongs to another cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm import job as slurm
from flows.backends.slurm.client import CommandResult
from flows.backends.slurm.options import SlurmOptions
from tests.flows.backends.slurm.fake_slurm import UNKNOWN, FakeSlurm, block, follow, state
from trainyard.errors import ConfigError, InfrastructureError


@dataclass
class Full(FakeSlurm):
    """A queue that takes no more jobs, for so many tries."""

    times: int = 10_000
    refused: Event = field(default_factory=Event)

    def __call__(self, command: Sequence[str]) -> CommandResult:
        answer = super().__call__(command)
        if command[0] != "sbatch" or self.asked.count("sbatch") > self.times:
            return answer
        self.refused.set()
        return CommandResult(
            1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: refused\n"
        )


def test_a_submission_waits_for_room_and_logs_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "ROOM_PAUSE_SECONDS", 0.001)
    played = Full([state("COMPLETED")], times=7)
    assert follow(block(tmp_path, played)).kind is Kind.DONE
    assert played.asked.count("sbatch") == 8
    (warning,) = [text for text in caplog.messages if "waits to be submitted" in text]
    assert "QOSMaxSubmitJobPerUserLimit" in warning


def test_a_submission_that_finds_no_room_for_too_long_is_infrastructure(tmp_path: Path) -> None:
    full = block(tmp_path, played := Full([UNKNOWN]))
    full.options = SlurmOptions(room_seconds=0)
    with pytest.raises(InfrastructureError, match=r"QOSMaxSubmitJob.*there was no room for 0 s"):
        follow(full)
    assert played.asked.count("sbatch") == 1


def test_a_submission_that_waits_for_room_is_cancelled_at_once(tmp_path: Path) -> None:
    played = Full([UNKNOWN])

    async def whole() -> None:
        triggering = asyncio.create_task(block(tmp_path, played).trigger())
        await asyncio.to_thread(played.refused.wait, 10)
        triggering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await triggering

    asyncio.run(asyncio.wait_for(whole(), 10))
    assert played.asked.count("sbatch") == 1
    assert "scancel" not in played.asked


@pytest.mark.parametrize("name", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_other_clusters_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "there")
    played = FakeSlurm([state("COMPLETED")])
    with pytest.raises(ConfigError, match=rf"variable {name} \(there\).*unset it"):
        follow(block(tmp_path / "run", played))
    assert not played.asked
    assert not (tmp_path / "run").exists()
