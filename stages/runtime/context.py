"""The context of a running stage: inputs, output, a work folder that survives kills, progress."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from stages.runtime.scratch import Scratch
from trainyard.artifacts import retry, store
from trainyard.artifacts.claim import Claim
from trainyard.artifacts.digest import digest_bytes, digest_document
from trainyard.artifacts.inputs import Input, Manifests
from trainyard.artifacts.manifest import ManifestSlot, PartRecord, retire
from trainyard.artifacts.output import FINAL_NAMES, Output
from trainyard.artifacts.store import FileRecord, OutputFile
from trainyard.artifacts.urls import check_relative, join
from trainyard.errors import Stopped
from trainyard.progress import Progress

log = logging.getLogger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to stop; SIGUSR1 is what schedulers send ahead of a time limit."""

ECHO_SECONDS = 5.0
"""A signal may arrive twice within this time: Slurm sends it to every process of a step, and
torchrun forwards it to its ranks."""


class WorkFolder:
    """Finished units of work, kept after a kill while inputs, options and code stay the same."""

    def __init__(self, output: Output, key: str) -> None:
        self._root = output.work_url
        self._mine = key[:12]
        self._recorded: set[str] = set()
        """Final names that this process recorded."""

    def url(self, name: str) -> str:
        """URL of the work file of that name."""
        return join(self._root, self._mine, check_relative(name))

    def open(self, name: str) -> OutputFile:
        """Start a work file; it appears when it is closed."""
        return store.open_output(self.url(name), name)

    def names(self) -> set[str]:
        """The existing work files, all complete, since none appears before it is closed."""
        return set(store.list_files(join(self._root, self._mine)))

    def publish(self, key: str, document: Mapping[str, Any]) -> None:
        """Mark a unit as finished, with a document about it."""
        store.write_bytes(self.url(f"{key}.unit.json"), json.dumps(document).encode())

    def published(self, key: str) -> dict[str, Any] | None:
        """The document of a finished unit; None if it is not finished."""
        return self._units.get(key)

    @cached_property
    def _units(self) -> dict[str, dict[str, Any]]:
        # Listed once: nothing looks up units that this run publishes.
        ending = ".unit.json"
        names = store.list_files(join(self._root, self._mine))
        keys = [name.removesuffix(ending) for name in names if name.endswith(ending)]
        return {key: store.read_json(self.url(key + ending)) for key in keys}

    def clean(self) -> None:
        """Remove leftovers of killed runs: incomplete files, units of other inputs or options."""
        for name in store.list_files(self._root):
            of_others = not name.startswith((self._mine + "/", FINAL_NAMES))
            if store.is_abandoned(name) or of_others:
                log.debug("removing leftover %s", join(self._root, name))
                store.delete(join(self._root, name))

    def record_final(self, names: Iterable[str]) -> None:
        """Record final names before this run writes them, so that a later run can remove them.

        Each record holds only new names: a run may write thousands of files."""
        new = sorted(set(names) - self._recorded)
        if new:
            document = json.dumps(new).encode()
            record = f"{FINAL_NAMES}{self._mine}-{digest_bytes(document)[:12]}.json"
            store.write_bytes(join(self._root, record), document)
            self._recorded.update(new)

    def final_names(self) -> set[str]:
        """The final names that this run and earlier, killed ones started to write."""
        records = [name for name in store.list_files(self._root) if name.startswith(FINAL_NAMES)]
        return {name for file in records for name in store.read_json(join(self._root, file))}

    def remove(self) -> None:
        """Remove everything, after the manifest is published."""
        store.delete_tree(self._root)


@dataclass
class StageRun:
    """One run of a stage, from the decision that there is work until the manifest."""

    name: str
    inputs: dict[str, Input]
    output: Output | None
    lineage: str = ""
    """Digest of configuration and inputs; unfinished work resumes only under the same lineage."""
    code: str = ""
    """Digest of the code; units of different versions are not mixed."""
    reason: str = ""
    is_forced: bool = False
    """True when --force was given, or the flow run forces this stage."""
    claim: Claim | None = None
    """Held while final files may be written; None in ranks, whose parent holds it."""
    is_main: bool = True
    """True on rank 0, whose records make the manifest."""
    slot: ManifestSlot | None = None
    """The manifest to replace, or None."""
    shares_lineage: str = ""
    """That of the shares to join, if it is another."""
    manifests: Manifests = field(default_factory=Manifests)
    """What was read of the inputs' manifests; each is read once."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries used, for the manifest."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further facts of the run for the manifest, outside every digest; JSON-able."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    parts: dict[str, PartRecord] = field(default_factory=dict)
    step_file: Path | None = None
    """File in which rank 0 of several reports its steps to the parent; None without a parent."""
    retired: bool = False
    _signal: int | None = None
    _deferred: bool = False
    _num_interrupts: int = 0
    _raised: float | None = None
    """When a signal last ended the run, by the clock of time.monotonic()."""
    _scratch: Scratch | None = None

    @cached_property
    def work(self) -> WorkFolder:
        """The work folder."""
        return WorkFolder(self._output, digest_document([self.lineage, self.code]))

    @property
    def _output(self) -> Output:
        assert self.output is not None, f"stages.{self.name} declares no output"
        return self.output

    @property
    def scratch(self) -> Path:
        """A local folder for this run, removed at its end."""
        if self._scratch is None:
            self._scratch = Scratch(self.name)
        return self._scratch.path

    def check_claim(self) -> None:
        """Raise ClaimHeldError if another run took the output over."""
        if self.claim is not None:
            self.claim.check()

    # --- writing ------------------------------------------------------------------------------

    def open(self, name: str, volatile: bool = False) -> OutputFile:
        """Start a final file; a clean close adds it to the manifest.

        An older file of that name, and its manifest, stay until then."""
        return _Recorded(self, self._output.file_url(name), name, volatile)

    def begin_final(self, name: str) -> None:
        """Called just before a final file appears: retire the old manifest and record the name."""
        self.begin_files([name])

    def begin_files(self, names: Iterable[str]) -> None:
        """As `begin_final`, once for several files, on rank 0 before any rank writes them."""
        self.begin_replacing()
        self.work.record_final(names)

    def write_bytes(self, name: str, data: bytes, volatile: bool = False) -> None:
        """Write a whole final file."""
        with self.open(name, volatile) as file:
            file.write(data)

    def write_text(self, name: str, text: str, volatile: bool = False) -> None:
        """Write a final text file, UTF-8."""
        self.write_bytes(name, text.encode(), volatile)

    def write_json(self, name: str, document: Any, volatile: bool = False) -> None:
        """Write a final JSON document, readable and with keys in the order given."""
        self.write_text(name, json.dumps(document, indent=1, allow_nan=False) + "\n", volatile)

    def record(self, record: FileRecord) -> None:
        """Add a file that was written by other means, by its path relative to the output."""
        check_relative(record.path)
        self.records[record.path] = record

    def record_part(self, part: PartRecord) -> None:
        """Add a folder with a manifest of its own, which lists its files in place of this run's."""
        check_relative(part.path)
        self.parts[part.path] = part

    def begin_replacing(self) -> None:
        """Retire the old manifest, if any, before final files are written.

        Closing a file from `open` does this; a stage that writes final files by other means calls
        it first."""
        self.check_claim()
        if self.slot is not None and not self.retired and self.is_main:
            self.slot = retire(self._output.manifest_url, self.slot, self.lineage)
            self.retired = True

    # --- progress and signals -----------------------------------------------------------------

    def progress(
        self, total: int | None, unit: str = "documents", desc: str = "", start: int = 0
    ) -> Progress:
        """Progress of this stage, as a context manager."""
        return Progress(total, unit, desc or self.name, start=start)

    def defer_signals(self) -> None:
        """From now on SIGTERM, SIGINT and SIGUSR1 only set `stop_requested`. Repeated signals are
        ignored, as the sender kills the run when its grace period ends. Ctrl-C has no grace period,
        so a second SIGINT stops at once."""
        self._deferred = True

    @property
    def stop_requested(self) -> bool:
        """True after a first deferred signal."""
        return self._signal is not None

    def stop(self) -> None:
        """Stop, as the deferred signal requested, after everything is saved."""
        assert self._signal is not None
        raise Stopped(self._signal)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler that the command line installs."""
        self.check_claim()  # a lost claim signals too; then nothing may be saved
        self._num_interrupts += signum == signal.SIGINT
        if not self._deferred:
            self._stop_at_once(signum)
        elif self._signal is None:
            self._signal = signum
            again = "; a second SIGINT stops at once" if signum == signal.SIGINT else ""
            log.warning(
                "%s: finishing what runs (a training: its step, then a save), then stopping%s",
                *(signal.Signals(signum).name, again),
            )
        elif signum == signal.SIGINT and self._num_interrupts > 1:
            retry.give_up()
            raise Stopped(signum)

    def _stop_at_once(self, signum: int) -> None:
        """Raise Stopped, but not again for an echo of the signal, which would interrupt the
        clean-up. A later signal raises again, since an exception may get lost in a callback."""
        now = time.monotonic()
        is_echo = self._raised is not None and now - self._raised < ECHO_SECONDS
        if is_echo and signum != signal.SIGINT:
            return
        self._raised = now
        retry.give_up()
        raise Stopped(signum)

    def close(self) -> None:
        """Remove the scratch folder."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


class _Recorded(OutputFile):
    """An output file that adds itself to its run's records on a clean close."""

    def __init__(self, run: StageRun, url: str, name: str, volatile: bool) -> None:
        super().__init__(url, name, volatile)
        self._run = run

    def close(self) -> None:
        if self._record is None and not self.closed:
            self._run.begin_final(self._name)
        super().close()
        if self._record is not None:
            self._run.record(self._record)


class Replacing:
    """Progress of writing a folder that other programs consider complete if a certain file exists;
    that file must not exist until all others are written.

    Callbacks for a writer: the total once it has planned its files, then the bytes written."""

    def __init__(self, stage: StageRun, complete: Sequence[str], stack: ExitStack) -> None:
        self._stage, self._complete, self._stack = stage, complete, stack
        self._progress: Progress | None = None

    def expect(self, total: int) -> None:
        """Set the total bytes, before anything is written."""
        self._stage.begin_replacing()
        for url in self._complete:
            store.delete(url)
        bar = self._stage.progress(total, "bytes", "convert")
        self._progress = self._stack.enter_context(bar)

    def advance(self, size: int) -> None:
        """Report bytes written."""
        assert self._progress is not None
        self._progress.update(size)


@contextmanager
def replacing(stage: StageRun, folder_url: str, complete: Sequence[str]) -> Iterator[Replacing]:
    """complete: names of the files that mark the folder as complete; removed before the first file
    is written."""
    with ExitStack() as stack:
        yield Replacing(stage, [join(folder_url, name) for name in complete], stack)
