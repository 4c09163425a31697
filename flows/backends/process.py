"""Runs a stage as a process on this machine, which never outlives this process for long.

The job has a session of its own, so a stop reaches all processes that it starts. It has the read
end of a pipe, and this process the write end: if this process dies, the kernel closes the pipe and
the job stops itself (stages/runtime/parent_watch.py). It writes log.txt itself, to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from prefect.blocks.abstract import JobBlock

from flows.backends.base import StageJobRun
from flows.backends.live_jobs import live
from flows.backends.outcome import Outcome, classify, read_failure
from flows.backends.process_log import ProcessLog, relay_unfinished
from flows.backends.run_folder import LOG, NOT_BEGUN, make_run_folder, run_folder_io
from flows.backends.spec import LaunchSpec
from trainyard.variables import OF_PREFECT

LIFELINE = "TRAINYARD_LIFELINE_FD"
RUN_DIRECTORY = "TRAINYARD_RUN_DIR"

POLL_SECONDS = 0.05

DRAIN_SECONDS = 10.0
"""How long the last lines of an ended job may take."""


class ProcessJob(JobBlock[Outcome]):
    """Runs a stage as a process of this machine, in the environment of this Python."""

    _block_type_name = "Process Job"
    _block_type_slug = "process-job"
    _description = "Runs a stage's own command as a local process."

    spec: LaunchSpec

    async def trigger(self) -> ProcessJobRun:
        """Start the command."""
        folder = Path(self.spec.run_directory)
        with run_folder_io(folder, NOT_BEGUN):
            make_run_folder(folder)
            output = (folder / LOG).open("ab")
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                self.spec.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.spec.working_directory,
                env=_environment(self.spec, read_end),
                pass_fds=(read_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
            output.close()
        self.logger.debug("started %s as process %d", self.spec.name, process.pid)
        return ProcessJobRun(self.spec, process, write_end)


class ProcessJobRun(StageJobRun):
    """A started process. Its output goes to log.txt, and from there to the run's logger."""

    def __init__(
        self, spec: LaunchSpec, process: subprocess.Popen[bytes], parent_pipe: int
    ) -> None:
        """parent_pipe: write end of the pipe that ends it."""
        super().__init__(spec, str(process.pid))
        self.pid = process.pid
        self._process = process
        self._parent_pipe: int | None = parent_pipe
        relay_unfinished(self._folder, self._relay)
        self._reader = ProcessLog(self._folder, spec.name, self._relay)
        self._reader.start()
        live.add(self)
        self._try_record_event("submitted")
        self._try_record_event("started")

    @property
    def log_path(self) -> Path:
        """All that the job wrote to stdout and stderr."""
        return self._folder / LOG

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
