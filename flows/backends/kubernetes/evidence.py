"""What is left of a job of Kubernetes when it has ended: reports in its run folder, what the
cluster said of it and its pods, its log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.backends.ending import Evidence, classify_exit
from flows.backends.kubernetes.records import PodRecord, WorkloadRecord
from flows.backends.notes import write_note
from flows.backends.outcome import (
    EXIT_STATUS,
    Kind,
    Outcome,
    read_failure,
    read_outcome,
    read_tail,
)
from flows.backends.run_folder import log_name, share_folder
from flows.backends.spec import LaunchSpec
from trainyard.errors import Stopped

END = "end.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What the cluster knew of the end of a job or a share; kept, since the cluster forgets."""

    verdict: Kind | None = None
    words: str = ""
    exit_code: int | None = None


def end_of(
    index: int | None,
    workloads: Sequence[WorkloadRecord],
    pods: Sequence[PodRecord],
    count: int = 1,
) -> End:
    """The end of a job, or of the share that is one of its completion indices.

    workloads: its own, and what that is made of; empty when the cluster has forgotten it.
    count: its pods."""
    job = next((one for one in workloads if one.has_ended), None)
    ours = pods if index is None else [pod for pod in pods if pod.index == index]
    done = {pod.index for pod in ours if pod.phase == "Succeeded"}
    is_done = job is not None and (job.has_succeeded or index in job.completed)
    if is_done or (job is None and len(done) >= count):
        return End(verdict=Kind.DONE, words="Complete", exit_code=0)
    if job is not None:
        verdict, words, code = job.verdict, job.words, job.culprit[1]
    elif workloads:
        verdict, words, code = Kind.STOPPED, "somebody deleted the job", None
    else:
        verdict, words, code = None, "Kubernetes has forgotten it", None
    cause = _cause(ours, job)
    if cause is None:
        return End(verdict=verdict, words=words, exit_code=code)
    told = filter(None, (f"pod {cause.name} on {cause.node or 'no node'}", cause.words))
    # A lost node or a lack of memory goes before what the Job makes of it.
    return End(
        verdict=cause.verdict or verdict,
        words=f"{words}; {': '.join(told)}",
        exit_code=cause.exit_code,
    )


def _cause(pods: Sequence[PodRecord], job: WorkloadRecord | None) -> PodRecord | None:
    """The pod whose end was the first and not a consequence of another's."""
    named = job.culprit[0] if job is not None else ""
    last = _last_of_each(pods, named)
    failed = [pod for pod in last if pod.verdict or pod.exit_code or pod.phase == "Failed"]

    def rank(pod: PodRecord) -> tuple[bool, bool, bool, str, int]:
        is_told = pod.verdict is not None
        was_ended = pod.exit_code in (137, 143) and not is_told
        return (not is_told, pod.name != named, was_ended, pod.finished or "~", pod.index)

    return min(failed, key=rank, default=None)


def _last_of_each(pods: Sequence[PodRecord], named: str) -> list[PodRecord]:
    """The newest pod of each completion index: one before it was taken away and replaced, which
    ended nothing."""
    # Times are whole seconds; of two in one of these the cluster keeps, and lists last, the newer.
    ordered = sorted(pods, key=lambda pod: (pod.created, pod.name == named))
    return list({pod.index: pod for pod in ordered}.values())


def decide(spec: LaunchSpec, share: int | None, end: End, ended_by_us: Kind | None) -> Outcome:
    """How a job, or one of its shares, ended."""
    folder = str(Path(spec.run_directory, share_folder(share)))
    code, failure = end.exit_code, read_failure(folder)
    if end.verdict in (Kind.CONFIG, Kind.INFRASTRUCTURE) and not _is_told_better(
        failure, end, ended_by_us
    ):
        return Outcome(
            name=spec.name,
            kind=end.verdict,
            exit_status=EXIT_STATUS[end.verdict],
            message=end.words,
        )
    if code is None and end.verdict is None and read_outcome(folder) is not None:
        code = 0  # written last
    seen = Evidence(
        failure=failure,
        verdict=end.verdict,
        words=end.words,
        exit_code=code,
        is_of_launcher=spec.has_ranks,
        ended_by_us=ended_by_us,
        log_tail=read_tail(Path(spec.run_directory, log_name(share))),
    )
    return classify_exit(spec.name, seen)


def _is_told_better(failure: Mapping[str, Any] | None, end: End, ended_by_us: Kind | None) -> bool:
    """True where failure.json says more than the cluster, which says that there was no way."""
    if failure is None:
        return False
    has_not_begun = ended_by_us is end.verdict or end.verdict is Kind.CONFIG
    # Of a pod that has not begun it is the word of one before it, which was taken away.
    return not has_not_begun and failure.get("class") != Stopped.__name__


def write_ends(folder: Path, ends: dict[int | None, End], ended_by_us: Kind | None) -> None:
    """Keep what the cluster said, for a program that follows after this one."""
    told = {"" if share is None else str(share): asdict(end) for share, end in ends.items()}
    write_note(folder / END, {"ends": told, "ended_by_us": ended_by_us})


def read_ends(folder: Path) -> tuple[dict[int | None, End], Kind | None] | None:
    """What was kept; None when the end was not seen."""
    try:
        document = json.loads((folder / END).read_text())
    except FileNotFoundError:
        return None
    ends = {
        int(share) if share else None: End(
            verdict=told["verdict"] and Kind(told["verdict"]),
            words=told["words"],
            exit_code=told["exit_code"],
        )
        for share, told in document["ends"].items()
    }
    by_us = document["ended_by_us"]
    return ends, by_us and Kind(by_us)
