"""The process block: real processes, listened to, classified, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.backends.live_jobs import stop_all
from flows.backends.outcome import Kind, Outcome
from flows.backends.process import ProcessJob, ProcessJobRun
from flows.backends.process_log import memory_of
from flows.backends.spec import LaunchSpec, Shares
from flows.logs.lines import MOST_BYTES, Followed
from tests.flows.disks import fill_with_files, small_disk
from tests.flows.processes import ROOT, is_running, python, read_pid, wait_until
from trainyard.errors import InfrastructureError

WRITE_PID = "import os; open({file!r}, 'w').write(f'{{os.getpid()}}\\n');"
SLEEP = "import time; time.sleep(60)"
SAVE = """
import signal, time
def save(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    open({file!r}, "w").write("yes")
    raise SystemExit(143)
signal.signal(signal.SIGTERM, save)
"""


def job(folder: Path, code: str, **values: Any) -> ProcessJob:
    spec = LaunchSpec(name="job", command=python(code), run_directory=str(folder), **values)
    return ProcessJob(spec=spec)


def run(folder: Path, code: str, **values: Any) -> Outcome:
    async def whole() -> Outcome:
        started = await job(folder, code, **values).trigger()
        await started.wait_for_completion()
        return await started.fetch_result()

    return asyncio.run(whole())


def sleeper(file: Path, before: str = "") -> str:
    return f"{before}\n{WRITE_PID.format(file=str(file))}\n{SLEEP}"


@pytest.mark.parametrize("status", [0, 1, 2, 3, 70])
def test_exit_status_is_classified(tmp_path: Path, status: int) -> None:
    assert run(tmp_path, f"raise SystemExit({status})").exit_status == status


def test_a_signal_is_classified(tmp_path: Path) -> None:
    assert run(tmp_path, "import os; os.kill(os.getpid(), 15)").kind is Kind.STOPPED
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)").kind is Kind.INFRASTRUCTURE


def test_failure_json_of_the_run_folder_is_read(tmp_path: Path) -> None:
    code = """
import json, os
with open(os.environ["TRAINYARD_RUN_DIR"] + "/failure.json", "w") as file:
    json.dump({"class": "DataError", "message": "line 3", "exit_status": 1, "step": 7}, file)
raise SystemExit(137)
"""
    outcome = run(tmp_path, code)
    assert (outcome.exit_status, outcome.message, outcome.step) == (1, "line 3", 7)


TALK = "import logging; [logging.error('x' * 999) for _ in range(400)]"  # as a stage does


def test_a_full_disk_does_not_keep_a_job_from_ending(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        assert run(disk / "run", TALK).kind is Kind.DONE
        assert 0 < (disk / "run" / "log.txt").stat().st_size < 400_000


def test_on_a_full_disk_no_job_is_begun(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_files=3) as disk:
        fill_with_files(disk)
        begun = disk / "filling"
        with pytest.raises(InfrastructureError, match=r"No space left.*no job was started"):
            run(disk / "run", f"open({str(begun)!r}, 'a').write('begun')")
        assert "begun" not in begun.read_text()


def test_a_command_that_does_not_exist_raises_and_leaks_nothing(tmp_path: Path) -> None:
    spec = LaunchSpec(name="job", command=("/no/such/program",), run_directory=str(tmp_path))
    before = len(os.listdir("/dev/fd"))

    async def attempt() -> None:
        with pytest.raises(FileNotFoundError):
            await ProcessJob(spec=spec).trigger()

    asyncio.run(attempt())
    assert len(os.listdir("/dev/fd")) == before


def test_the_result_of_a_running_job_is_refused_with_the_next_step(tmp_path: Path) -> None:
    async def ask() -> None:
        started = await job(tmp_path, SLEEP).trigger()
        try:
            with pytest.raises(ValueError, match="call wait_for_completion"):
                await started.fetch_result()
        finally:
            await started.stop()

    asyncio.run(ask())


def test_job_gets_no_prefect_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:x")
    code = "import os; raise SystemExit(any(name.startswith('PREFECT_') for name in os.environ))"
    assert run(tmp_path, code).exit_status == 0


def test_environment_and_working_directory_reach_the_job(tmp_path: Path) -> None:
    code = "import os; print(os.environ['COLOUR'], os.getcwd())"
    run(tmp_path / "run", code, environment={"COLOUR": "red"}, working_directory=str(tmp_path))
    assert (tmp_path / "run" / "log.txt").read_text() == f"red {tmp_path.resolve()}\n"


# --- listening --------------------------------------------------------------------------------


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int, str]]:
    """Time, level and text of everything that the block logs."""
    seen: list[tuple[float, int, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((time.monotonic(), record.levelno, record.getMessage()))

    logger = logging.Logger("job", logging.DEBUG)
    logger.addHandler(Keep())
    monkeypatch.setattr(ProcessJobRun, "logger", logger)
    return seen


@pytest.mark.slow
def test_lines_arrive_at_once(tmp_path: Path, records: list[tuple[float, int, str]]) -> None:
    run(tmp_path, "import time; print('first'); time.sleep(0.5); print('second')")
    assert [text for *_, text in records] == ["first", "second"]
    assert records[1][0] - records[0][0] > 0.3


def test_levels_of_a_stage_survive(tmp_path: Path, records: list[tuple[float, int, str]]) -> None:
    code = """
import sys
print("12:00:00 warning loop: grad norm is 1e9", file=sys.stderr)
print("12:00:01 error   loop: gave up", file=sys.stderr)
print("plain")
"""
    run(tmp_path, code)
    assert [(level, text) for _, level, text in records] == [
        (logging.WARNING, "loop: grad norm is 1e9"),
        (logging.ERROR, "loop: gave up"),
        (logging.INFO, "plain"),
    ]
    assert (tmp_path / "log.txt").read_text().startswith("12:00:00 warning loop")


def test_unusual_lines_are_read(tmp_path: Path, records: list[tuple[float, int, str]]) -> None:
    code = """
import sys
out = sys.stdout.buffer
out.write(b"x" * 300_000 + b"\\n10 %\\r20 %\\r\\n\\xff no newline at the end")
"""
    run(tmp_path, code)
    texts = [text for *_, text in records]
    assert texts[0] == "x" * MOST_BYTES + f" [{300_000 - MOST_BYTES} bytes left out]"
    assert texts[1:] == ["10 %", "20 %", "\ufffd no newline at the end"]


def test_grandchild_does_not_delay_the_end(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper(pid_file)!r}])"
    )
    code += f"\nimport os, time\nwhile not os.path.exists({str(pid_file)!r}): time.sleep(0.01)"
    began = time.monotonic()
    assert run(tmp_path, code).kind is Kind.DONE
    assert time.monotonic() - began < 5
    assert wait_until(lambda: not is_running(read_pid(pid_file)))


@pytest.mark.slow
def test_the_log_goes_on_if_it_cannot_be_relayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise SystemExit(1)  # as rich when the worker is gone, to which a flow run writes

    monkeypatch.setattr(ProcessJobRun, "_relay", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    code = "import time; print('first'); time.sleep(0.3); print('second')"
    assert run(tmp_path, code).kind is Kind.DONE
    assert (tmp_path / "log.txt").read_text() == "first\nsecond\n"


def test_the_next_attempt_relays_what_a_killed_flow_did_not(
    tmp_path: Path, records: list[tuple[float, int, str]]
) -> None:
    killed = tmp_path / "1"
    killed.mkdir()
    (killed / "log.txt").write_text("step 1\n")
    followed = Followed(killed, memory_of(killed / "log.txt").name)
    assert [*followed.read("log.txt")] == ["step 1"]
    followed.remember()
    (killed / "log.txt").write_text("step 1\nstep 2\n")
    run(tmp_path / "2", "print('step 3')")
    run(tmp_path / "3", "print('step 4')")
    texts = [text for *_, text in records]
    assert f"({killed / 'log.txt'})" in texts.pop(0)
    assert texts == ["step 2", "step 3", "step 4"]


# --- shares -----------------------------------------------------------------------------------

MAKE_SHARE = """
import json, os, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("share", arguments["--rank"], "of", arguments["--world-size"])
if arguments["--rank"] in {failing!r}:
    with open(os.environ["TRAINYARD_RUN_DIR"] + "/failure.json", "w") as file:
        json.dump({{"class": "DataError", "message": "line 3", "exit_status": 1}}, file)
    raise SystemExit(1)
"""


def test_each_share_is_a_process_with_its_own_log_and_report(
    tmp_path: Path, records: list[tuple[float, int, str]]
) -> None:
    code, shares = MAKE_SHARE.format(failing=("1",)), Shares(count=3, at_once=2)
    folder = tmp_path / "run"
    outcome = run(folder, code, shares=shares)
    assert (outcome.exit_status, outcome.failed_shares) == (1, (1,))
    assert outcome.message == "1 of 3 shares failed (1); share 1: line 3"
    assert sorted(text for *_, text in records) == [f"{k}: share {k} of 3" for k in range(3)]
    logs = [path.name for path in sorted(folder.glob("log*"))]
    assert logs == ["log-00000.txt", "log-00001.txt", "log-00002.txt"]
    assert not list(folder.glob("relayed*"))
    done = run(folder, MAKE_SHARE.format(failing=()), shares=replace(shares, only=(1,)))
    assert (done.kind, done.failed_shares) == (Kind.DONE, ())
    assert (folder / logs[1]).read_text() == 2 * "share 1 of 3\n"


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [2, None], ids=["two", "default"])
def test_no_more_shares_run_than_are_wanted_at_once(tmp_path: Path, at_once: int | None) -> None:
    code = f"""
import os, time
folder = {str(tmp_path / "running")!r}
os.makedirs(folder, exist_ok=True)
mine = f"{{folder}}/{{os.getpid()}}"
open(mine, "w").close()
time.sleep(0.1)
count = len(os.listdir(folder))
os.remove(mine)
raise SystemExit(count > 2)
"""
    assert run(tmp_path, code, shares=Shares(count=5, at_once=at_once)).kind is Kind.DONE


def test_cancelling_stops_all_shares_and_starts_no_other(tmp_path: Path) -> None:
    code = f"import os, sys; file = {str(tmp_path)!r} + '/pid-' + sys.argv[2]\n"
    code += f"open(file, 'w').write(f'{{os.getpid()}}\\n')\n{SLEEP}"
    pids: list[int] = []

    def ready() -> None:
        pids.extend(read_pid(tmp_path / f"pid-{rank}") for rank in range(2))

    cancel(tmp_path, code, ready, grace_seconds=10, shares=Shares(count=3, at_once=2))
    assert not any(is_running(pid) for pid in pids)
    assert not (tmp_path / "pid-2").exists()


# --- stopping ---------------------------------------------------------------------------------


def cancel(
    folder: Path,
    code: str,
    ready: Callable[[], Any],
    grace_seconds: float,
    times: int = 1,
    shares: Shares | None = None,
) -> float:
    """Start a job, cancel the waiting when it is ready; seconds until the cancelling is over."""

    async def whole() -> float:
        started = await job(folder, code, grace_seconds=grace_seconds, shares=shares).trigger()
        waiting = asyncio.create_task(started.wait_for_completion())
        await asyncio.to_thread(ready)
        began = time.monotonic()
        for _ in range(times):
            waiting.cancel()
            await asyncio.sleep(0.1)
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        return time.monotonic() - began

    return asyncio.run(whole())


def test_cancelling_stops_the_job_and_its_children(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper(child)!r}])"
    pids: list[int] = []

    def ready() -> None:
        pids.extend([read_pid(parent), read_pid(child)])

    cancel(tmp_path, sleeper(parent, start), ready, grace_seconds=10)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = sleeper(pid_file, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    took = cancel(tmp_path, code, lambda: read_pid(pid_file), grace_seconds=0.3)
    assert 0.3 <= took < 5
    assert not is_running(read_pid(pid_file))


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_job_has_time_to_save(tmp_path: Path, times: int) -> None:
    saved, pid_file = tmp_path / "saved", tmp_path / "pid"
    code = sleeper(pid_file, SAVE.format(file=str(saved)))
    cancel(tmp_path, code, lambda: read_pid(pid_file), grace_seconds=10, times=times)
    assert saved.read_text() == "yes"
    assert "saving" in (tmp_path / "log.txt").read_text()


STARTER = """
import asyncio, sys
from flows.backends.process import ProcessJob
from flows.backends.spec import LaunchSpec

async def main():
    spec = LaunchSpec(name="job", command=tuple(sys.argv[2:]), run_directory=sys.argv[1])
    await (await ProcessJob(spec=spec).trigger()).wait_for_completion()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_job_does_not_outlive_a_flow_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hold = "from stages.runtime import parent_watch; parent_watch.stop_with_parent(5.0)\n"
    hold += SAVE.format(file=str(tmp_path / "saved"))
    command = [sys.executable, "-c", STARTER, str(tmp_path), *python(sleeper(pid_file, hold))]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as flow:
        pid = read_pid(pid_file)
        assert is_running(pid)
        flow.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not is_running(pid))
    assert (tmp_path / "saved").exists()
    assert "saving" in (tmp_path / "log.txt").read_text()  # written after the flow's end
    assert memory_of(tmp_path / "log.txt").exists()


@pytest.mark.slow
def test_stop_all_stops_jobs_whose_cancellation_was_lost(tmp_path: Path) -> None:
    async def whole() -> Outcome:
        started = await job(tmp_path, SLEEP).trigger()
        asyncio.get_running_loop().call_later(0.3, stop_all)
        await started.wait_for_completion()
        assert started.is_stopping_or_ended
        return await started.fetch_result()

    began = time.monotonic()
    assert asyncio.run(whole()).kind is Kind.STOPPED
    assert time.monotonic() - began < 20
