"""Repeated signals, as Slurm and torchrun send them, and a second Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from stages.runtime import cli, context, ranks
from stages.runtime.context import StageRun
from tests.stages.directly import until, wait_for_line
from trainyard.artifacts.output import Output
from trainyard.errors import Stopped

PROGRAM = ["-m", "tests.stages.toy_ranks"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 60

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def toy(
    folder: Path, saving_seconds: float, *launcher: str, ranks: int = 1
) -> subprocess.Popen[str]:
    """Ranks that work until a signal stops them, and then save for so long."""
    options = ["--output-dir", str(folder), "--seconds", "600"]
    options += ["--saving-seconds", str(saving_seconds)]
    if not launcher:
        options += ["--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [sys.executable, *launcher, *PROGRAM, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def work(folder: Path, count: int) -> None:
    """Until all ranks are at work."""
    until(lambda: len(list(folder.rglob("?.txt"))) == count)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("?.saved.txt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "again"),
    [(TERM, (TERM, TERM)), (USR1, (TERM,)), (INT, (TERM,))],
    ids=["SIGTERM three times", "SIGUSR1 and SIGTERM", "Ctrl-C and SIGTERM"],
)
def test_a_repeated_signal_does_not_interrupt_a_save(
    tmp_path: Path, first: signal.Signals, again: tuple[signal.Signals, ...]
) -> None:
    with toy(tmp_path, 0.3) as process:
        work(tmp_path, 1)
        process.send_signal(first)
        wait_for_line(process, "rank 0 saves")
        for number in again:
            process.send_signal(number)
        assert process.wait(SECONDS) == 128 + first
    assert saved(tmp_path) == ["0.saved.txt"]


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with toy(tmp_path, 600) as process:
        work(tmp_path, 1)
        process.send_signal(INT)
        wait_for_line(process, "a second SIGINT stops at once")
        wait_for_line(process, "rank 0 saves")
        process.send_signal(INT)
        assert process.wait(SECONDS) == 130
    assert saved(tmp_path) == []


def tell_all(folder: Path, number: signal.Signals) -> None:
    """As scancel does: every process of a job, launchers among them."""
    for pid in subprocess.check_output(["pgrep", "-f", str(folder)], text=True).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [(), pytest.param(TORCHRUN, marks=pytest.mark.distributed)],
    ids=["ours", "torchrun"],
)
def test_every_rank_saves_if_all_are_signalled(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    with toy(tmp_path, 2.0, *launcher, ranks=2) as process:
        work(tmp_path, 2)
        tell_all(tmp_path, TERM)
        wait_for_line(process, " saves", count=2)
        tell_all(tmp_path, TERM)
        # torchrun waits for up to 30 s a rank where a signal meets it within a wait for its ranks.
        assert process.wait(2 * SECONDS) != 0
    assert saved(tmp_path) == ["0.saved.txt", "1.saved.txt"]


def test_a_rank_that_a_signal_ends_before_it_has_a_handler_is_stopped(tmp_path: Path) -> None:
    run = StageRun("toy", {}, Output.directory(str(tmp_path)))
    run.defer_signals()
    run.on_signal(TERM, None)
    with pytest.raises(Stopped):
        ranks._raise_if_stopped(run, [-TERM, 128 + TERM], 0)


def test_a_stage_does_not_ignore_what_its_launcher_ignored() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (TERM, USR1)}
    try:
        cli._end_at_signals()
        assert {signal.getsignal(number) for number in before} == {signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- a run that stops at once ---------------------------------------------------------------------


def test_a_repeated_signal_does_not_interrupt_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StageRun("toy", {}, Output.directory(str(tmp_path)))
    for number in (TERM, INT):
        with pytest.raises(Stopped):
            run.on_signal(number, None)
    run.on_signal(TERM, None)
    monkeypatch.setattr(context, "ECHO_SECONDS", 0.0)
    with pytest.raises(Stopped):  # the one before may have got lost
        run.on_signal(TERM, None)
