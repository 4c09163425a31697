"""The ledgers in the steps of a run: whether each is as published and follows the one before.

Training needs no ledger: weights, moments and position are in other files. A damaged ledger cannot
be rebuilt either. So a run resumes in spite of it, with a warning that its proof has a gap. The
whole ledger keeps the readable lines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.lines import file_record, read_lines, split_lines
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


MAX_KEPT = 4 * 2**20
"""Bytes of a ledger that is kept in memory between two uses."""


@dataclass(frozen=True, slots=True)
class StepLedger:
    """The ledger of one step."""

    step: int
    url: str
    content: Content
    digest: Any
    """`ledger_digest` of `state.json`: of all lines up to this step."""
    fault: str = ""
    """Why it is not as published, or does not follow the one before."""

    @property
    def record(self) -> FileRecord | None:
        """The record of the file as it is; None if it is unreadable."""
        return self.content.record

    def lines(self) -> Iterator[str | None]:
        """The lines; None in place of an unreadable one."""
        for line in self.content.lines(self.url):
            if line:
                yield _text(line, self.url)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a ledger: in memory if it is small, else read again for each use."""

    record: FileRecord | None = None
    """None if the file is unreadable."""
    data: bytes | None = None

    def lines(self, url: str) -> Iterator[bytes]:
        """The lines, without their ends; none if it is unreadable."""
        if self.record is None:
            return iter(())
        return read_lines(url) if self.data is None else split_lines([self.data])

    @staticmethod
    def of(url: str) -> Content:
        """Read the content of a file."""
        if store.info(url).size_bytes > MAX_KEPT:
            return Content(file_record(url, FILE))
        data = store.read_bytes(url)
        return Content(FileRecord(FILE, len(data), digest_bytes(data)), data)


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


def _published(step_url: str) -> tuple[Content, str]:
    """The content of the file, and its fault."""
    url = join(step_url, FILE)
    try:
        manifest = manifest_of(step_url)
        check_inside(step_url, [FILE])
        content = Content.of(url)
    except ArtifactError as error:
        return Content(), str(error)
    record, found = None if manifest is None else manifest.record(FILE), content.record
    assert found is not None
    if record is None:
        return content, f"{url}: manifest.json does not list it"
    if found.size_bytes != record.size_bytes:
        sizes = f"{found.size_bytes} bytes, manifest.json says {record.size_bytes} bytes"
        return content, f"{url}: {sizes}"
    if found.digest != record.digest:
        return content, f"{url}: digest {found.digest}, manifest.json says {record.digest}"
    return content, ""


def read_ledgers(root_url: str, steps: Sequence[int]) -> Iterator[StepLedger]:
    """The ledgers of a run's steps, ascending: permanent steps, except perhaps the last."""
    threads = LOCAL_THREADS if is_local(root_url) else REMOTE_THREADS
    before: StepLedger | None = None
    for found in in_threads(partial(_read, root_url), steps, threads):
        yield found if found.fault else replace(found, fault=_break(found, before))
        before = found


def _read(root_url: str, step: int) -> StepLedger:
    step_url = join(root_url, step_folder(step))
    content, fault = _published(step_url)
    state = step_document(step_url, STATE)
    digest = state.get("ledger_digest") if isinstance(state, dict) else None
    return StepLedger(step, join(step_url, FILE), content, digest, fault)


def _break(ledger: StepLedger, before: StepLedger | None) -> str:
    """Why a ledger as published does not follow the one of the step before."""
    first, last = 0, -1 if before is None else before.step
    digest = "" if before is None else before.digest
    try:
        for line in ledger.content.lines(ledger.url):
            text = line.decode("ascii")
            if not first:
                step = int(parse_line(text, ledger.url)["step"])
                if step <= last:
                    continue  # a temporary step repeats lines of the one before
                first = max(step, 1)
                if before is None and step > 1:
                    return ""  # the run started from another one, or steps were removed by hand
                if before is not None and step > last + 1:
                    starts = f"it starts at step {step}, and the one before it ends at {last}"
                    return f"{ledger.url}: {starts}"
            digest = chain([text], digest)
    except (UnicodeDecodeError, ArtifactError) as error:
        return f"{ledger.url}: {error}" if isinstance(error, UnicodeDecodeError) else str(error)
    if digest == ledger.digest:
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


def join_ledgers(ledgers: Iterable[StepLedger]) -> Iterator[bytes]:
    """The lines of the whole ledger with their ends, without unreadable ones, which are logged."""
    last = 0
    for ledger in ledgers:
        kept, unread = 0, 0
        for line in ledger.lines():
            if line is None:
                unread += 1
                continue
            kept += 1
            yield line.encode() + b"\n"
        if ledger.fault or unread:
            log.warning(
                "the ledger of the run has a gap at steps %d to %d, which cannot be proven: kept "
                "%d lines, dropped %d unreadable ones (%s)",
                *(last + 1, ledger.step, kept, unread),
                ledger.fault or f"{ledger.url}: not lines of steps",
            )
        last = ledger.step


def carried_lines(step_url: str, step: int, last_staying: int) -> list[str]:
    """The lines of a temporary step that no permanent step has: those after `last_staying`, or all
    if that is 0. Logs and drops unreadable lines."""
    url = join(step_url, FILE)
    content, fault = _published(step_url)
    lines: list[str] = []
    unread = 0
    for line in StepLedger(step, url, content, None, fault).lines():
        if line is None:
            unread += 1
        elif last_staying == 0 or parse_line(line, url)["step"] > last_staying:
            lines.append(line)
    if unread:
        log.warning("%s: dropped %d unreadable lines", url, unread)
    return lines
