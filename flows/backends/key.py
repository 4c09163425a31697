"""What a submission is known by, wherever it is looked for: in a queue, in a list of pods.

The key follows from what the submission is for and how often we have submitted that ourselves, so
that a flow that was killed and started again computes the same one, finds its job, and follows it
instead of submitting another. Prefect's own count of runs would not do: it grows with every start
of the flow, whether or not anything was submitted."""

from __future__ import annotations

import hashlib

DIGITS = 16
"""Of a SHA-256: two of a yard's submissions will not meet."""


def job_key(flow_run: str, task: str, submission: int) -> str:
    """The key of the n-th submission, from 1, that a flow run makes for one of its tasks."""
    if submission < 1:
        raise ValueError(f"submissions count from 1, got {submission}")
    told = "\0".join((flow_run, task))
    return f"{hashlib.sha256(told.encode()).hexdigest()[:DIGITS]}-{submission}"


def submission_of(key: str) -> int:
    """The count that a key was made with."""
    return int(key.rpartition("-")[2])
