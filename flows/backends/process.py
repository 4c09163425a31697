"""Runs a stage as a process on this machine, which never outlives this process for long; shares of
an output as a process each.

The job has a session of its own, so a stop reaches all processes that it starts. It has the read
end of a pipe, and this process the write end: if this process dies, the kernel closes the pipe and
the job stops itself (stages/runtime/parent_watch.py). It writes its log itself, to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends.base import StageJobRun
from flows.backends.live_jobs import live
from flows.backends.outcome import (
    Kind,
    Outcome,
    classify,
    join_shares,
    of_kind,
    read_failure,
)
from flows.backends.process_log import ProcessLog, relay_unfinished
from flows.backends.run_folder import (
    LOG,
    NOT_BEGUN,
    log_name,
    make_run_folder,
    run_folder_io,
    share_folder,
)
from flows.backends.spec import LaunchSpec, Shares
from trainyard.variables import OF_PREFECT

LIFELINE = "TRAINYARD_LIFELINE_FD"
RUN_DIRECTORY = "TRAINYARD_RUN_DIR"

POLL_SECONDS = 0.05

DRAIN_SECONDS = 10.0
"""How long the last lines of an ended job may take."""

SHARES_AT_ONCE = 2
"""Where the profile does not say. A share takes all cores, and as much memory of the machine and of
its GPU as elsewhere one with a machine of its own; two, as one works while the other begins, reads
or writes."""


class ProcessJob(JobBlock[Outcome]):
    """Runs a stage as a process of this machine, in the environment of this Python."""

    _block_type_name = "Process Job"
    _block_type_slug = "process-job"
    _description = "Runs a stage's own command as a local process."

    spec: LaunchSpec

    async def trigger(self) -> ProcessJobRun | ShareProcessesRun:
        """Start the command, or that of each share."""
        spec, folder = self.spec, Path(self.spec.run_directory)
        with run_folder_io(folder, NOT_BEGUN):
            make_run_folder(folder)
        if spec.shares is not None:
            return ShareProcessesRun(spec, spec.shares)
        run = start_process(spec, folder / LOG)
        self.logger.debug("started %s as process %d", spec.name, run.pid)
        return run


def start_process(spec: LaunchSpec, log: Path, label: str = "") -> ProcessJobRun:
    """Start a command. log: gets its output; label: begins each of its lines in the run's log."""
    with run_folder_io(log.parent, NOT_BEGUN):
        output = log.open("ab")
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=spec.working_directory,
            env=_environment(spec, read_end),
            pass_fds=(read_end,),
            start_new_session=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
        output.close()
    return ProcessJobRun(spec, process, write_end, log, label)


class ProcessJobRun(StageJobRun):
    """A started process. Its output goes to its log, and from there to the run's logger."""

    def __init__(
        self,
        spec: LaunchSpec,
        process: subprocess.Popen[bytes],
        parent_pipe: int,
        log: Path,
        label: str,
    ) -> None:
        """parent_pipe: write end of the pipe that ends it."""
        super().__init__(spec, str(process.pid))
        self.pid = process.pid
        self.log_path = log
        """All that the job wrote to stdout and stderr."""
        self._process = process
        self._parent_pipe: int | None = parent_pipe
        relay_unfinished(log.parent, self._relay)
        self._reader = ProcessLog(log, spec.name, lambda line: self._relay(line, label))
        self._reader.start()
        live.add(self)
        self._try_record_event("submitted")
        self._try_record_event("started")

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Wait until the job has ended. Any error meanwhile stops the job."""
        try:
            await super().wait_for_completion()
        finally:
            await self.stop()

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _outcome(self) -> Outcome:
        code = self._process.poll()
        assert code is not None, "it has ended"
        return classify(self.spec.name, code, read_failure(self.spec.run_directory))

    async def _stop_job(self) -> None:
        """Send SIGTERM to all of its processes; after the grace, SIGKILL to those that remain."""
        try:
            if self._signal(signal.SIGTERM):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wait_until_gone(), self.spec.grace_seconds)
        finally:
            self._signal(signal.SIGKILL)
            if self._parent_pipe is not None:
                os.close(self._parent_pipe)
                self._parent_pipe = None
        await self._wait_until_ended()
        await self._drain()
        self._record_ended(self._outcome().kind)

    def _signal(self, number: int) -> bool:
        """Signal the job's process group; False if none of its processes is alive."""
        if not _is_alive(self.pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        return True

    async def _wait_until_ended(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)

    async def _wait_until_gone(self) -> None:
        await self._wait_until_ended()
        while _is_alive(self.pid):
            await asyncio.sleep(POLL_SECONDS)

    async def _drain(self) -> None:
        self._reader.end()
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._reader.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS / 5)


class ShareProcessesRun(StageJobRun):
    """The shares of a job, each a process. They start as `shares_at_once` lets them, by default
    two at a time, and one that fails does not stop the others."""

    def __init__(self, spec: LaunchSpec, shares: Shares) -> None:
        super().__init__(spec, spec.name)
        self._shares = shares
        self._runs: dict[int, ProcessJobRun] = {}
        self._followed: list[asyncio.Task[None]] = []
        live.add(self)
        self._try_record_event("submitted")
        self._try_record_event("started")

    async def wait_for_completion(self) -> None:  # type: ignore[override]  # a Logger, says the base
        """Wait until all have ended. Any error meanwhile stops the job."""
        try:
            await super().wait_for_completion()
        finally:
            await self.stop()

    async def _wait_until_ended(self) -> None:
        indices = self._shares.indices
        slots = asyncio.Semaphore(self._shares.at_once or SHARES_AT_ONCE)
        self._followed = [asyncio.create_task(self._make(index, slots)) for index in indices]
        await asyncio.gather(*self._followed)

    async def _make(self, index: int, slots: asyncio.Semaphore) -> None:
        """Start a share when there is a slot, unless the job is being stopped, and follow it."""
        async with slots:
            if self._stopping is None:
                spec = _of_share(self.spec, index, self._shares.count)
                with run_folder_io(self._folder, NOT_BEGUN):
                    make_run_folder(Path(spec.run_directory))
                run = start_process(spec, self._folder / log_name(index), f"{index}: ")
                self._runs[index] = run
                await run.wait_for_completion()

    async def _stop_job(self) -> None:
        """Stop all shares that run, side by side; the others do not start."""
        for run in self._runs.values():
            run.begin_stopping()
        if self._followed:
            await asyncio.wait(self._followed)
        self._record_ended(self._outcome().kind)

    def _has_ended(self) -> bool:
        none_starts = self._stopping is not None or len(self._runs) == len(self._shares.indices)
        return none_starts and all(run._has_ended() for run in self._runs.values())

    def _outcome(self) -> Outcome:
        never = of_kind(self.spec.name, Kind.STOPPED, "stopped before it began")
        outcomes: dict[int | None, Outcome] = {
            index: self._runs[index]._outcome() if index in self._runs else never
            for index in self._shares.indices
        }
        return join_shares(self.spec.name, outcomes)

    async def _drain(self) -> None:
        """Each share has done so."""


def _of_share(spec: LaunchSpec, index: int, count: int) -> LaunchSpec:
    """The job of one share; what it reports goes to a folder of its own."""
    options = ("--rank", str(index), "--world-size", str(count))
    folder = str(Path(spec.run_directory, share_folder(index)))
    return replace(spec, command=(*spec.command, *options), run_directory=folder, shares=None)


def _is_alive(group: int) -> bool:
    """True while a process of the group runs.

    Zombies do not count: in a container process 1 inherits them and may never reap them."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _environment(spec: LaunchSpec, parent_pipe: int) -> dict[str, str]:
    return {
        **{name: v for name, v in os.environ.items() if not name.startswith(OF_PREFECT)},
        "PYTHONUNBUFFERED": "1",
        **spec.environment,
        LIFELINE: str(parent_pipe),
        RUN_DIRECTORY: spec.run_directory,
    }
