"""The ledgers in the steps of a run: whether each is as published and follows the one before.

Training needs no ledger: weights, moments and position are in other files. A damaged ledger cannot
be rebuilt either. So a run resumes in spite of it, with a warning that its proof has a gap. The
whole ledger keeps the readable lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import is_local, join
from trainyard.checkpoint.safetensors.shard import LOCAL_THREADS, REMOTE_THREADS, in_threads
from trainyard.checkpoint.steps import (
    STATE,
    check_inside,
    manifest_of,
    step_document,
    step_folder,
)
from trainyard.errors import ArtifactError
from trainyard.training.loop.ledger import FILE, chain
from trainyard.training.run.run_record import parse_line

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepLedger:
    """The ledger of one step."""

    step: int
    url: str
    data: bytes | None
    """The content of the file; None if it is unreadable."""
    digest: Any
    """`ledger_digest` of `state.json`: of all lines up to this step."""
    fault: str = ""
    """Why it is not as published, or does not follow the one before."""

    @property
    def record(self) -> FileRecord | None:
        """The record of the file; None if it is unreadable."""
        if self.data is None:
            return None
        return FileRecord(FILE, len(self.data), digest_bytes(self.data))

    def lines(self) -> tuple[list[str], int]:
        """The readable lines, and the number of unreadable ones."""
        lines = (self.data or b"").split(b"\n")
        texts = [text for line in lines if line and (text := _text(line, self.url)) is not None]
        return texts, sum(bool(line) for line in lines) - len(texts)


def _text(line: bytes, url: str) -> str | None:
    try:
        text = line.decode("ascii")
        parse_line(text, url)
    except (UnicodeDecodeError, ArtifactError):
        return None
    return text if text.isprintable() else None  # a carriage return would split it


def ledger_fault(step_url: str) -> str:
    """Why the ledger of a step differs from its manifest; empty if it does not. Reads all of it, as
    it is small."""
    return _published(step_url)[1]


def _published(step_url: str) -> tuple[bytes | None, str]:
    """The content of the file, and its fault."""
    url = join(step_url, FILE)
    try:
        manifest = manifest_of(step_url)
        check_inside(step_url, [FILE])
        data = store.read_bytes(url)
    except ArtifactError as error:
        return None, str(error)
    record = None if manifest is None else manifest.record(FILE)
    if record is None:
        return data, f"{url}: manifest.json does not list it"
    if len(data) != record.size_bytes:
        return data, f"{url}: {len(data)} bytes, manifest.json says {record.size_bytes} bytes"
    found = digest_bytes(data)
    if found != record.digest:
        return data, f"{url}: digest {found}, manifest.json says {record.digest}"
    return data, ""


def read_ledgers(root_url: str, steps: Sequence[int]) -> Iterator[StepLedger]:
    """The ledgers of a run's steps, ascending: permanent steps, except perhaps the last."""
    threads = LOCAL_THREADS if is_local(root_url) else REMOTE_THREADS
    before: StepLedger | None = None
    for found in in_threads(partial(_read, root_url), steps, threads):
        yield found if found.fault else replace(found, fault=_break(found, before))
        before = found


def _read(root_url: str, step: int) -> StepLedger:
    step_url = join(root_url, step_folder(step))
    data, fault = _published(step_url)
    state = step_document(step_url, STATE)
    digest = state.get("ledger_digest") if isinstance(state, dict) else None
    return StepLedger(step, join(step_url, FILE), data, digest, fault)


def _break(ledger: StepLedger, before: StepLedger | None) -> str:
    """Why a ledger as published does not follow the one of the step before."""
    assert ledger.data is not None
    begins, first, last = 0, 0, -1 if before is None else before.step
    try:
        lines = ledger.data.decode("ascii").splitlines()
        for line in lines:  # a temporary step repeats lines of the one before
            first = int(parse_line(line, ledger.url)["step"])
            if first > last:
                break
            begins += 1
    except (UnicodeDecodeError, ArtifactError) as error:
        return f"{ledger.url}: {error}" if isinstance(error, UnicodeDecodeError) else str(error)
    own = lines[begins:]
    if before is None and own and first > 1:
        return ""  # the run started from another one, or steps were removed by hand
    if before is not None and own and first > last + 1:
        return f"{ledger.url}: it starts at step {first}, and the one before it ends at {last}"
    if chain(own, "" if before is None else before.digest) == ledger.digest:
        return ""
    start = "the beginning" if before is None else f"that of step {before.step}"
    return f"{ledger.url}: its lines do not lead from {start} to the ledger_digest of {STATE}"


# --- the whole ledger ---------------------------------------------------------------------------


def warn_about_gaps(root_url: str, steps: Sequence[int]) -> None:
    """Warn about the damaged ledgers of a run that resumes."""
    last = 0
    for ledger in read_ledgers(root_url, steps):
        if ledger.fault:
            log.warning(
                "%s. Weights, optimizer and position are sound and the run continues, but it "
                "CANNOT BE PROVEN any more that steps %d to %d lost and repeated no sample: "
                "unreadable lines will be missing from the ledger of the run, and stages.certify "
                "will report the run as broken there. If you have a copy of %s, restore it before "
                "the run ends",
                *(ledger.fault, last + 1, ledger.step, ledger.url),
            )
        last = ledger.step


def join_ledgers(ledgers: Sequence[StepLedger]) -> bytes:
    """The whole ledger, without unreadable lines, which are logged."""
    joined: list[str] = []
    last = 0
    for ledger in ledgers:
        lines, unread = ledger.lines()
        if ledger.fault or unread:
            log.warning(
                "the ledger of the run has a gap at steps %d to %d, which cannot be proven: kept "
                "%d lines, dropped %d unreadable ones (%s)",
                *(last + 1, ledger.step, len(lines), unread),
                ledger.fault or f"{ledger.url}: not lines of steps",
            )
        joined += lines
        last = ledger.step
    return "".join(f"{line}\n" for line in joined).encode()


def carried_lines(step_url: str, step: int, last_staying: int) -> list[str]:
    """The lines of a temporary step that no permanent step has: those after `last_staying`, or all
    if that is 0. Logs and drops unreadable lines."""
    url = join(step_url, FILE)
    data, fault = _published(step_url)
    lines, unread = StepLedger(step, url, data, None, fault).lines()
    if unread:
        log.warning("%s: dropped %d unreadable lines", url, unread)
    if last_staying == 0:
        return lines
    return [line for line in lines if parse_line(line, url)["step"] > last_staying]
