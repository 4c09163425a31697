"""What is left of a job of Slurm when it has ended: reports in its run folder, state, log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.launch.ending import Evidence
from flows.launch.outcome import Kind, read_failure, read_tail
from flows.launch.slurm import EXIT, log_name, share_folder
from flows.launch.slurm_state import JobRecord
from flows.launch.spec import LaunchSpec


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
    code = read_exit_code(folder / EXIT)
    if record is not None and record.state == "COMPLETED":
        code = 0
    if record is not None and record.state == "FAILED" and not code:
        code = record.exit_code or None  # a 0 in the file is of a run before this one
    return Evidence(
        failure=read_failure(str(folder)),
        verdict=None if record is None else record.verdict,
        words=f"job {job_id}: {record.words if record else 'Slurm has forgotten it'}",
        exit_code=code,
        is_of_launcher=spec.has_ranks,
        ended_by_us=ended_by_us,
        log_tail=read_tail(Path(spec.run_directory, log_name(index))),
    )


def read_exit_code(path: Path) -> int | None:
    """What the script left when it came to its end; None when it did not."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return int(document["exit_status"])
