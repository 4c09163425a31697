"""Gathers, stores and prints the account of a run's time, from its run folders and artifacts.

    python -m flows.goodput YARD/.runs/pretrain YARD/checkpoint

prints it. After each attempt a flow writes it to goodput/JOB.json under its root, together with the
times of submissions whose run folders are gone."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.backends.events import Event, read_events
from flows.backends.outcome import Kind, read_outcome
from flows.backends.run_folder import HEARTBEAT, LOG
from flows.goodput.account import (
    IN_LOOP,
    Account,
    Attempt,
    Mark,
    Span,
    Spent,
    Submission,
    account,
    allocated,
    percentages,
)
from trainyard.arguments import Parser
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import basename, join
from trainyard.charts.markdown import code, escape
from trainyard.errors import ConfigError, TrainyardError
from trainyard.logging import printable

SHOWN_MS = 50
"""A kind of less time has no line; it is part of the sums."""

FORMAT_VERSION = 1
ATTEMPTS = "attempts.json"
"""In the folder of a finished run: the documents of all attempts."""
UNIT = "attempt-"
"""Prefix of the documents in the work folder of an unfinished run: one for each attempt."""
LIVE_FILES = (LOG, HEARTBEAT)
"""Files of a run folder that a running job writes."""

Document = dict[str, Any]

# --- gathering ----------------------------------------------------------------------------------


def goodput_url(root: str, job: str) -> str:
    """Where the account of a job is kept, among the artifacts of a root."""
    return join(root, "goodput", f"{job}.json")


def record_goodput(attempts: Path, output: Output, url: str) -> Account | None:
    """Update the account of a job at a URL; None, and nothing written, without any attempt.

    attempts: the folder of its run folders."""
    kept = store.read_json(url) if store.exists(url) else {}
    known = {document["attempt"]: _submission(document) for document in kept.get("submissions", [])}
    known |= {submission.attempt: submission for submission in read_submissions(attempts)}
    submissions = last_run(list(known.values()))
    # Keep an attempt whose document is gone if a submission of this run made it: a training that
    # resumes under another version of the code starts its documents over.
    holds = [span for submission in submissions for span in submission.holds]
    documents = {
        document["began"]: document
        for document in kept.get("told", [])
        if any(begin <= _ms(document["began"]) <= end for begin, end in holds)
    }
    documents |= {document["began"]: document for document in read_attempts(output)}
    if not documents:
        return None  # reused, or it ended before training
    ordered = [documents[began] for began in sorted(documents)]
    found = account(submissions, [attempt_of(document) for document in ordered])
    text = json.dumps(to_document(found, submissions, ordered), indent=1) + "\n"
    store.write_bytes(url, text.encode())
    return found


def account_of(attempts: Path, checkpoint: str) -> Account:
    """The account of the run at a URL; attempts: the folder of its run folders.

    Raises ConfigError if that is missing, or if no training has recorded anything."""
    if not attempts.is_dir():
        raise ConfigError(
            f"{attempts}: there is no such folder; give the one that holds the run folders of the "
            f"training, such as yard/NAME/.runs/pretrain"
        )
    documents = read_attempts(Output.directory(checkpoint))
    if not documents:
        raise ConfigError(
            f"{checkpoint}: no training has recorded its times there; give the "
            f"folder or URL that was its --save, such as yard/NAME/checkpoint"
        )
    submissions = last_run(read_submissions(attempts))
    return account(submissions, [attempt_of(document) for document in documents])


def read_submissions(attempts: Path) -> list[Submission]:
    """The submissions with run folders, without those that found nothing to do."""
    found = []
    for folder in sorted(attempts.iterdir()) if attempts.is_dir() else ():
        if (read_outcome(str(folder)) or {}).get("outcome") == "noop":
            continue
        live = [file.stat().st_mtime for name in LIVE_FILES if (file := folder / name).exists()]
        submission = submission_of(read_events(folder), max(live, default=0.0))
        if submission is not None:
            found.append(submission)
    return found


def submission_of(events: Sequence[Event], last_sign: float) -> Submission | None:
    """The submission of these events; None without any.

    last_sign: when the job last wrote something, in seconds since 1970; used if its end was not
    recorded."""
    events = [event for event in events if event.event != "reattached"]
    spans: dict[str, list[Span]] = {"queued": [], "started": []}
    state, since, moment = "", 0, 0
    for event in events:
        moment = max(_ms(event.time), moment)  # clocks of two machines
        entered = {"submitted": "queued", "ended": ""}.get(event.event, event.event)
        if state != entered:
            if state:
                spans[state].append((since, moment))
            state, since = entered, moment
    if state:
        spans[state].append((since, max(_ms(last_sign), moment)))
    if not any(spans.values()):
        return None
    return Submission(
        attempt=events[-1].attempt,
        waits=tuple(spans["queued"]),
        holds=tuple(spans["started"]),
        kind=str(events[-1].facts.get("kind", "")),
    )


def last_run(submissions: Sequence[Submission]) -> list[Submission]:
    """The submissions of the newest run, in order of time: those after the last one that finished
    an earlier run of the same job."""
    ordered = sorted(submissions, key=lambda s: (min(s.waits + s.holds), max(s.waits + s.holds)))
    done = [i for i, s in enumerate(ordered[:-1]) if s.kind == Kind.DONE]
    return ordered[max(done, default=-1) + 1 :]


def read_attempts(output: Output) -> list[Document]:
    """The documents of the attempts at a run, finished or not."""
    names = [name for name in store.list_files(output.work_url) if basename(name).startswith(UNIT)]
    if names:  # newer than what a run with other options left in the folder
        return [store.read_json(join(output.work_url, name)) for name in sorted(names)]
    whole = output.file_url(ATTEMPTS)
    return list(store.read_json(whole)) if store.exists(whole) else []


def attempt_of(document: Mapping[str, Any]) -> Attempt:
    """An attempt as training wrote it."""
    loop, ended = document.get("loop_began"), document.get("ended")
    return Attempt(
        began=_ms(document["began"]),
        ranks=int(document.get("ranks", 1)),
        restore=_ms(document.get("restore_seconds", 0.0)),
        from_step=document.get("from_step"),
        loop_began=None if loop is None else _ms(loop),
        marks=tuple(_mark(mark) for mark in document.get("marks", ())),
        ended=None if ended is None else _ms(ended),
        outcome=str(document.get("outcome", "")),
    )


def _mark(document: Mapping[str, Any]) -> Mark:
    keys = {**{kind: kind for kind in IN_LOOP}, "step": "step_seconds"}
    spent = {kind: _ms(document.get(key, 0.0)) for kind, key in keys.items()}
    return Mark(step=int(document["step"]), time=_ms(document["time"]), spent=spent)


def _submission(document: Mapping[str, Any]) -> Submission:
    waits, holds = (tuple((a, b) for a, b in document[name]) for name in ("waits", "holds"))
    return Submission(attempt=document["attempt"], waits=waits, holds=holds, kind=document["kind"])


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


# --- as a document and as text --------------------------------------------------------------------


def to_document(
    found: Account, submissions: Sequence[Submission], attempts: Sequence[Document]
) -> Document:
    """The account in seconds, and what it was made of; JSON-able."""

    def seconds(spent: Spent) -> dict[str, float]:
        return {kind: amount / 1000 for kind, amount in spent.items()}

    rows = [
        {
            **dataclasses.asdict(row),
            "begin": row.begin / 1000,
            "end": row.end / 1000,
            "spent": {kind: amount for kind, amount in seconds(row.spent).items() if amount},
        }
        for row in found.rows
    ]
    return {
        "format_version": FORMAT_VERSION,
        "goodput": None if found.goodput is None else round(found.goodput, 5),
        "begin": found.begin / 1000,
        "end": found.end / 1000,
        "allocated_seconds": found.allocated / 1000,
        "device_seconds": found.device_seconds,
        "spent_seconds": seconds(found.spent),
        "spent_percent": percentages(found.spent),
        "allocated_percent": percentages(allocated(found.spent)),
        "attempts": rows,
        "submissions": [dataclasses.asdict(submission) for submission in submissions],
        "told": list(attempts),
    }


def markdown(found: Account) -> str:
    """Tables of where the time went, and of the attempts."""
    whole, ours = percentages(found.spent), percentages(allocated(found.spent))
    share = "" if found.goodput is None else f"{100 * found.goodput:.1f} %"
    lines = [
        f"**Goodput {share}**: of {_time(found.allocated)} of allocated time, "
        f"{_time(found.spent['step'])} went into steps that were kept "
        f"({found.device_seconds / 3600:,.2f} device hours allocated).",
        "",
        "| where the time went | time | of all | of the allocated time |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, amount in found.spent.items():
        if amount >= SHOWN_MS:
            of_allocated = f"{ours[kind]:.1f} %" if kind in ours else ""
            name = kind.replace("_", " ")
            lines.append(f"| {name} | {_time(amount)} | {whole[kind]:.1f} % | {of_allocated} |")
    lines += [
        f"| **all** | {_time(found.end - found.begin)} | 100.0 % | 100.0 % |",
        "",
        "| attempt | allocated | ranks | steps | lost | ended |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    for row in found.rows:
        steps = lost = ""
        if row.from_step is not None:
            steps = f"{row.from_step:,} to {max(row.last_step or 0, row.from_step):,}"
        if row.spent["lost"]:
            lost = _time(row.spent["lost"])
        time = _time(row.end - row.begin)
        lines.append(
            f"| {code(row.attempt)} | {time} | {row.ranks or ''} | {steps} | {lost} "
            f"| {escape(row.ended)} |"
        )
    return "\n".join(lines) + "\n"


def _time(milliseconds: int) -> str:
    """1:02:03, or 4.2 s below a minute."""
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the account of a run; returns the exit status."""
    parser = Parser(
        prog="python -m flows.goodput", description="Show where the time of a run went."
    )
    parser.add_argument("attempts", type=Path, help="folder of the run folders of its job")
    parser.add_argument("checkpoint", help="folder or URL of the run: --save of pretrain")
    given = parser.parse_args(argv)
    try:
        print(markdown(account_of(given.attempts, given.checkpoint)), end="")
    except TrainyardError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_status
    return 0
