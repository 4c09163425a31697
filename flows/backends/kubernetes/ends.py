"""How a job of Kubernetes ended, from the cluster's reports and the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.backends.kubernetes.records import PodRecord, WorkloadRecord
from flows.backends.outcome import (
    JobEnd,
    Kind,
    Outcome,
    classify_exit,
    of_kind,
    read_failure,
    read_outcome,
    read_tail,
)
from flows.backends.run_folder import log_name, read_record, share_folder, write_record
from flows.backends.spec import LaunchSpec
from trainyard.errors import Stopped

END = "end.json"
"""File of a run folder: the end of its job as the cluster reported it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a job or a share as the cluster reported it; recorded, since clusters forget."""

    verdict: Kind | None = None
    words: str = ""
    """For people."""
    exit_code: int | None = None


def end_of(
    index: int | None,
    workloads: Sequence[WorkloadRecord],
    pods: Sequence[PodRecord],
    count: int = 1,
) -> End:
    """The end of a job, or of the share at a completion index.

    workloads: the job, and the Jobs that a JobSet is made of; empty if the cluster has forgotten
    it. count: its pods."""
    job = next((one for one in workloads if one.has_ended), None)
    ours = pods if index is None else [pod for pod in pods if pod.index == index]
    done = {pod.index for pod in ours if pod.phase == "Succeeded"}
    is_done = job is not None and (job.has_succeeded or index in job.completed)
    if is_done or (job is None and len(done) >= count):
        return End(verdict=Kind.DONE, words="Complete", exit_code=0)
    if job is not None:
        verdict, words, code = job.verdict, job.summary, job.culprit[1]
    elif workloads:
        verdict, words, code = Kind.STOPPED, "the job was deleted", None
    else:
        verdict, words, code = None, "the cluster no longer knows it", None
    cause = _cause(ours, job)
    if cause is None:
        return End(verdict=verdict, words=words, exit_code=code)
    parts = filter(None, (f"pod {cause.name} on {cause.node or 'no node'}", cause.message))
    # The pod's verdict, such as a lost node, is narrower than the Job's.
    return End(
        verdict=cause.verdict or verdict,
        words=f"{words}; {': '.join(parts)}",
        exit_code=cause.exit_code,
    )


def _cause(pods: Sequence[PodRecord], job: WorkloadRecord | None) -> PodRecord | None:
    """The pod whose end came first and is no consequence of another's.

    Of each completion index only the newest pod counts: older ones were replaced."""
    named = job.culprit[0] if job is not None else ""
    # Times are whole seconds; of two pods of one second the named one is the newer.
    ordered = sorted(pods, key=lambda pod: (pod.created, pod.name == named))
    newest = {pod.index: pod for pod in ordered}.values()
    failed = [pod for pod in newest if pod.verdict or pod.exit_code or pod.phase == "Failed"]

    def rank(pod: PodRecord) -> tuple[bool, bool, bool, str, int]:
        has_verdict = pod.verdict is not None
        was_ended = pod.exit_code in (137, 143) and not has_verdict
        return (not has_verdict, pod.name != named, was_ended, pod.finished or "~", pod.index)

    return min(failed, key=rank, default=None)


def classify_end(
    spec: LaunchSpec, share: int | None, end: End, stop_reason: Kind | None
) -> Outcome:
    """How a job, or one of its shares, ended."""
    folder = str(Path(spec.run_directory, share_folder(share)))
    code, failure = end.exit_code, read_failure(folder)
    if end.verdict in (Kind.CONFIG, Kind.INFRASTRUCTURE):
        # If the pod never ran, the report is from an earlier pod that was preempted.
        never_ran = stop_reason is end.verdict or end.verdict is Kind.CONFIG
        if failure is None or never_ran or failure.get("class") == Stopped.__name__:
            return of_kind(spec.name, end.verdict, end.words)
    if code is None and end.verdict is None and read_outcome(folder) is not None:
        code = 0  # a successful stage writes it last
    return classify_exit(
        spec.name,
        JobEnd(
            failure=failure,
            verdict=end.verdict,
            message=end.words,
            exit_code=code,
            is_of_launcher=spec.has_ranks,
            stop_reason=stop_reason,
            log_tail=read_tail(Path(spec.run_directory, log_name(share))),
        ),
    )


def write_ends(folder: Path, ends: dict[int | None, End], stop_reason: Kind | None) -> None:
    """Record the end as the cluster reported it, for the next program that follows the job."""
    shown = {"" if share is None else str(share): asdict(end) for share, end in ends.items()}
    write_record(folder / END, {"ends": shown, "ended_by_us": stop_reason})


def read_ends(folder: Path) -> tuple[dict[int | None, End], Kind | None] | None:
    """The recorded ends, and why we stopped the job; None if no end was recorded."""
    document = read_record(folder / END)
    if document is None:
        return None
    ends = {}
    for share, end in document["ends"].items():
        verdict = end["verdict"] and Kind(end["verdict"])
        ends[int(share) if share else None] = End(**{**end, "verdict": verdict})
    by_us = document["ended_by_us"]
    return ends, by_us and Kind(by_us)
