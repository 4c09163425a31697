"""What is left of a job of Slurm when it has ended: reports in its run folder, state, log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from flows.backends.ending import Evidence
from flows.backends.outcome import EXIT_STATUS, Kind, Outcome, read_failure, read_tail
from flows.backends.run_folder import log_name, share_folder
from flows.backends.slurm.records import JobRecord
from flows.backends.slurm.script import EXIT
from flows.backends.spec import LaunchSpec

OUT_OF_MEMORY = re.compile(r"^srun: error: .*: tasks? \S+: Out Of Memory$", re.MULTILINE)
"""srun of a step that a cgroup ended; the job itself is FAILED, with status 1."""


def gather(
    spec: LaunchSpec,
    index: int | None,
    job_id: str,
    record: JobRecord | None,
    ended_by_us: Kind | None,
) -> Evidence:
    """The evidence of a job, or of one of its shares.

    record: Slurm's last word; None when it knows the job no more."""
    folder = Path(spec.run_directory, share_folder(index))
    log = Path(spec.run_directory, log_name(index))
    log_tail = read_tail(log)
    code = read_exit_code(folder / EXIT, None if spec.shares else job_id)
    verdict = None if record is None else record.verdict
    words = f"job {job_id}: {record.words if record else 'Slurm has forgotten it'}"
    if record is not None and record.had_no_log:
        # Of a run before this one, which was requeued, there may be anything.
        has_begun = not record.restarts and (code is not None or bool(log_tail))
        if not has_begun:
            verdict, words = Kind.NODE_FAILURE, f"{words}; {_no_log(record, log)}"
    if record is not None and record.state == "COMPLETED":
        code = 0
    if record is not None and record.state == "FAILED" and not code:
        code = record.exit_code or None  # a 0 in the file is of a run before this one
    if verdict is None and code != 0 and OUT_OF_MEMORY.search(log_tail):
        verdict = Kind.OUT_OF_MEMORY
    return Evidence(
        failure=read_failure(str(folder)),
        verdict=verdict,
        words=words,
        exit_code=code,
        is_of_launcher=spec.has_ranks,
        ended_by_us=ended_by_us,
        was_requeued=record is not None and record.restarts > 0,
        log_tail=log_tail,
    )


def _no_log(record: JobRecord, log: Path) -> str:
    node = record.nodes or "its node"
    return (
        f"which it says where it could not open the job's log, {log}: does {node} see that folder, "
        f"may the user write there, is its disk full, does Slurm's prolog fail? A node that is "
        f"alone in this belongs into the Slurm option exclude"
    )


def never_started(name: str, job_id: str, why: str) -> Outcome:
    """The outcome of a job that was cancelled in the queue, as it would have waited for ever.

    why: empty when another program of ours cancelled it, which knew."""
    why = why or "it waited for what never comes"
    message = (
        f"job {job_id} could not have started: {why}; correct the Slurm options of the yard or "
        f"the job's resources"
    )
    kind = Kind.CONFIG
    return Outcome(name=name, kind=kind, exit_status=EXIT_STATUS[kind], message=message)


def read_exit_code(path: Path, job_id: str | None = None) -> int | None:
    """What the script left when it came to its end; None when it did not.

    job_id: of no other job, such as one of the same script that a person submitted."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if job_id is not None and document.get("job_id", job_id) != job_id:
        return None
    return int(document["exit_status"])
