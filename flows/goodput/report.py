"""The account of a run's time, gathered from run folders and artifacts, and kept beside them.

    python -m flows.goodput YARD/.runs/pretrain YARD/checkpoint

prints it; flows write it to goodput/JOB.json under their root after each attempt, with the times of
submissions whose run folders are gone by now."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.backends.events import read_events
from flows.backends.outcome import Kind, read_outcome
from flows.backends.run_folder import HEARTBEAT, LOG
from flows.goodput.account import KINDS, UNALLOCATED, Account, Row, account, percentages
from flows.goodput.spans import Submission, attempt_of, ms, submission_of
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ConfigError, TrainyardError

Document = dict[str, Any]

FORMAT_VERSION = 1

ATTEMPTS = "attempts.json"
"""What training leaves in the folder of a finished run, and a document of each attempt before."""
UNIT = "attempt-"

SHOWN_MS = 50
"""What took less is part of the sums, and has no line of its own."""

SIGNS = (LOG, HEARTBEAT)
"""Files of a run folder that are written to while a job lives."""


def goodput_url(root: str, job: str) -> str:
    """Where the account of a job's time lies, among the artifacts of a root."""
    return join(root, "goodput", f"{job}.json")


def record_goodput(attempts: Path, output: Output, url: str) -> Account | None:
    """Bring the account of a job up to date at a URL; None, and nothing written, when there is
    nothing to account for. attempts: the folder of its run folders."""
    kept = store.read_json(url) if store.exists(url) else {}
    earlier = map(_submission, kept.get("submissions", []))
    submissions = of_this_run(_joined(earlier, read_submissions(attempts)))
    documents = joined_documents(kept.get("told", []), read_attempts(output), submissions)
    if not documents:
        return None  # reused, or it never came to training: the stage table tells that
    found = account(submissions, [attempt_of(document) for document in documents])
    document = json.dumps(to_document(found, submissions, documents), indent=1) + "\n"
    store.write_bytes(url, document.encode())
    return found


# --- gathering ----------------------------------------------------------------------------------


def read_submissions(attempts: Path) -> list[Submission]:
    """Those whose run folders are there, without those that found nothing to do."""
    found = []
    for folder in sorted(attempts.iterdir()) if attempts.is_dir() else ():
        if (read_outcome(str(folder)) or {}).get("outcome") == "noop":
            continue
        submission = submission_of(read_events(folder), _last_sign(folder))
        if submission is not None:
            found.append(submission)
    return found


def _last_sign(folder: Path) -> float:
    """When a job was last heard of."""
    return max((p.stat().st_mtime for n in SIGNS if (p := folder / n).exists()), default=0.0)


def _joined(earlier: Iterable[Submission], now: Iterable[Submission]) -> list[Submission]:
    """Those that were known and those that are, each once, in the order of time."""
    known = {submission.attempt: submission for submission in (*earlier, *now)}
    return sorted(known.values(), key=lambda submission: submission.span)


def of_this_run(submissions: Sequence[Submission]) -> list[Submission]:
    """The last submission and those before it back to one that ended well: that finished an earlier
    run of the same job."""
    done = [i for i, s in enumerate(submissions[:-1]) if s.kind == Kind.DONE]
    return list(submissions[max(done, default=-1) + 1 :])


def read_attempts(output: Output) -> list[Document]:
    """What attempts at a run said, of a finished run or of one that is not."""
    names = [name for name in store.list_files(output.work_url) if basename(name).startswith(UNIT)]
    if names:  # before what a run of other options has left in the folder
        return [store.read_json(join(output.work_url, name)) for name in sorted(names)]
    whole = output.file_url(ATTEMPTS)
    return list(store.read_json(whole)) if store.exists(whole) else []


def joined_documents(
    earlier: Iterable[Document], now: Sequence[Document], submissions: Sequence[Submission]
) -> list[Document]:
    """Those that are there, and those that were and belong to a submission of this run: a training
    that went on under another version of the code began its account anew."""
    holds = [span for submission in submissions for span in submission.holds]
    known = {
        document["began"]: document
        for document in earlier
        if any(begin <= ms(document["began"]) <= end for begin, end in holds)
    }
    known |= {document["began"]: document for document in now}
    return [known[began] for began in sorted(known)]


# --- the document -------------------------------------------------------------------------------


def to_document(
    found: Account, submissions: Sequence[Submission], told: Sequence[Document]
) -> dict[str, Any]:
    """The account in seconds, and what it was made of; JSON-able."""
    return {
        "format_version": FORMAT_VERSION,
        "goodput": None if found.goodput is None else round(found.goodput, 5),
        "begin": found.begin / 1000,
        "end": found.end / 1000,
        "allocated_seconds": found.allocated / 1000,
        "device_seconds": found.device_seconds,
        "spent_seconds": _seconds(found.spent),
        "spent_percent": percentages(found.spent),
        "allocated_percent": percentages(held(found.spent)),
        "attempts": [_row_document(row) for row in found.rows],
        "submissions": [dataclasses.asdict(submission) for submission in submissions],
        "told": list(told),
    }


def held(spent: Mapping[str, int]) -> dict[str, int]:
    """Without the kinds in which nothing was held."""
    return {kind: amount for kind, amount in spent.items() if kind not in UNALLOCATED}


def _seconds(spent: Mapping[str, int]) -> dict[str, float]:
    return {kind: amount / 1000 for kind, amount in spent.items()}


def _row_document(row: Row) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row),
        "begin": row.begin / 1000,
        "end": row.end / 1000,
        "spent": {kind: s for kind, s in _seconds(row.spent).items() if s},
    }


def _submission(document: Mapping[str, Any]) -> Submission:
    return Submission(
        attempt=document["attempt"],
        waits=tuple((begin, end) for begin, end in document["waits"]),
        holds=tuple((begin, end) for begin, end in document["holds"]),
        kind=document["kind"],
    )


# --- for people ---------------------------------------------------------------------------------


def markdown(found: Account) -> str:
    """Where the time went, and what each attempt was, as tables."""
    whole, ours = percentages(found.spent), percentages(held(found.spent))
    share = "" if found.goodput is None else f"{100 * found.goodput:.1f} %"
    lines = [
        f"**Goodput {share}**: of {_time(found.allocated)} in which something was held, "
        f"{_time(found.spent['step'])} went into steps that were kept "
        f"({found.device_seconds / 3600:,.2f} device hours held).",
        "",
        "| where the time went | time | of all | of what was held |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind in KINDS:
        if found.spent[kind] >= SHOWN_MS:
            of_held = f"{ours[kind]:.1f} %" if kind in ours else ""
            amount = _time(found.spent[kind])
            lines.append(f"| {words(kind)} | {amount} | {whole[kind]:.1f} % | {of_held} |")
    lines.append(f"| **all** | {_time(found.end - found.begin)} | 100.0 % | 100.0 % |")
    lines += [
        "",
        "| attempt | held | ranks | steps | lost | ended |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    lines += [_row_line(row) for row in found.rows]
    return "\n".join(lines) + "\n"


def _row_line(row: Row) -> str:
    steps = ""
    if row.from_step is not None:
        steps = f"{row.from_step:,} to {max(row.last_step or 0, row.from_step):,}"
    cells = (
        f"`{row.attempt}`",
        _time(row.end - row.begin),
        str(row.ranks or ""),
        steps,
        _time(row.spent["lost"]) if row.spent["lost"] else "",
        row.ended,
    )
    return "| " + " | ".join(cells) + " |"


def words(kind: str) -> str:
    """A kind as it is shown."""
    return kind.replace("_", " ")


def _time(milliseconds: int) -> str:
    """1:02:03, or 4.2 s below a minute."""
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the account of a run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.goodput", description="Where the time of a run went."
    )
    parser.add_argument("attempts", type=Path, help="folder of the run folders of its job")
    parser.add_argument("checkpoint", help="folder or URL of the run: --save of pretrain")
    given = parser.parse_args(argv)
    try:
        print(markdown(account_of(given.attempts, given.checkpoint)), end="")
    except TrainyardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def account_of(attempts: Path, checkpoint: str) -> Account:
    """The account of the run at a URL; attempts: the folder of its run folders.

    Raises ConfigError for a folder that is not there, and where no training has told anything."""
    if not attempts.is_dir():
        raise ConfigError(
            f"{attempts}: there is no such folder; give the one that holds the run folders of the "
            f"training, such as yard/NAME/.runs/pretrain"
        )
    told = [attempt_of(document) for document in read_attempts(Output.directory(checkpoint))]
    if not told:
        raise ConfigError(
            f"{checkpoint}: no training has told there what it spent its time on; give the folder "
            f"or URL that was its --save, such as yard/NAME/checkpoint"
        )
    return account(of_this_run(read_submissions(attempts)), told)
