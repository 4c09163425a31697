"""Appends finished units, in order, to the files of the output while later units still run.

Everything is a stream: memory does not grow with the number of units or documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from stages.runtime.context import StageRun
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.pack import Pack, Summary
from stages.tokenize.unit import TokenizeJob
from trainyard.artifacts import inputs, store
from trainyard.artifacts.block_digest import num_blocks
from trainyard.artifacts.store import OutputFile
from trainyard.artifacts.urls import canonical
from trainyard.corpus.documents import DocumentReader
from trainyard.corpus.formats.parse import begins
from trainyard.corpus.indexed import IndexedWriter
from trainyard.corpus.pairs import BAD_LINES, SUMS
from trainyard.corpus.provenance.origins import SidecarPart, join_provenance
from trainyard.corpus.sums import BlockDigests
from trainyard.errors import DataError


@dataclass(slots=True)
class Totals:
    """What the units add up to; one of all units, or of a rank's share."""

    documents: int = 0
    validated: int = 0
    bad_lines: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    """Lines seen of each file, by its number in the input."""


class Assembly:
    """The final files being written; use as a context manager, `finish` on success."""

    def __init__(
        self,
        config: TokenizeConfig,
        stage: StageRun,
        jobs: Sequence[TokenizeJob],
        dtype: np.dtype[Any],
    ) -> None:
        self._config, self._stage, self._jobs = config, stage, jobs
        self._origins = stage.scratch / "origins"
        self._origins.mkdir()
        self._parts: list[SidecarPart] = []
        self._stack = ExitStack()
        self._added = 0
        self._lines: Counter[int] = Counter()
        self.totals = Totals()
        self.digests: dict[str, dict[int, str]] = {}
        """Of blocks of the input, by URL and number; of a share alone."""
        with ExitStack() as stack:
            bins = [
                stack.enter_context(stage.open(config.file_stem(key) + ".bin"))
                for key in config.json_keys
            ]
            self._sums = [BlockDigests(out) for out in bins]
            self._writers = [IndexedWriter(out, dtype) for out in bins]
            self._bad: OutputFile | None = None
            if config.on_bad_line == "skip":
                self._bad = stack.enter_context(stage.open(BAD_LINES, volatile=True))
            self._stack = stack.pop_all()

    def __enter__(self) -> Assembly:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def catch_up(self, finished: set[str]) -> None:
        """Append the next units that are finished."""
        while self._added < len(self._jobs):
            job = self._jobs[self._added]
            if job.unit.name not in finished:
                return
            self._add(job)
            self._added += 1

    def _add(self, job: TokenizeJob) -> None:
        paths = [self._local(job, name) for name in job.packs]
        for k, path in enumerate(paths):
            with Pack(path) as pack:
                for tokens, lengths, counts in pack.lots():
                    self._writers[k].add_flat(tokens, lengths, counts)
                if k == 0:
                    self._add_first(job, pack)
        for path in paths if job.copies is not None else ():
            path.unlink()

    def _local(self, job: TokenizeJob, name: str) -> Path:
        """The pack on this machine: where it was made, or fetched if an earlier run made it."""
        if job.copies is not None and Path(job.copies, name).exists():
            return Path(job.copies, name)
        return inputs.fetch(store.join(job.work_url, name), self._stage.scratch / "packs")

    def _add_first(self, job: TokenizeJob, pack: Pack) -> None:
        summary, unit = pack.summary, job.unit
        shifts = [self._lines[number] for number in unit.files]
        path = self._origins / unit.name
        with path.open("wb") as out:
            pack.copy_origins(out)
        named = zip(unit.sources, shifts, strict=True)
        self._parts.append(
            SidecarPart(str(path), {canonical(s.url): shift for s, shift in named if shift})
        )
        for bad in pack.bad_lines():
            source = unit.sources[i := bad.pop("range")]
            self.totals.bad_lines += 1
            reader = DocumentReader(source, self._config.json_keys)
            place = partial(reader.place, bad["line"], bad["offset"])
            check_bad_lines(self._config, self.totals.bad_lines, bad, place)
            bad["line"] += shifts[i]
            write_bad_line(self._bad, {"source": canonical(source.url), **bad})
        self._count(unit.files, summary)
        for source, digests in zip(unit.sources, summary.digests, strict=True):
            blocks = enumerate(digests, num_blocks(source.start))
            self.digests.setdefault(source.url, {}).update(blocks)

    def _count(self, files: Iterable[int], summary: Summary) -> None:
        self.totals.documents += summary.documents
        self.totals.validated += summary.validated
        for number, lines in zip(files, summary.lines, strict=True):
            self._lines[number] += lines

    def finish(self) -> Totals:
        """Write the indices and origins, which are known at the end only; returns the totals."""
        assert self._added == len(self._jobs), "not all units are finished"
        for key, writer in zip(self._config.json_keys, self._writers, strict=True):
            self.totals.tokens[key] = writer.num_tokens
            self.totals.sequences[key] = writer.num_sequences
        if self._config.rank is None:
            refuse_nothing(self._config, self.totals)
        stems = [self._config.file_stem(key) for key in self._config.json_keys]
        # In one record: one for each file would take more time than a small input.
        self._stage.begin_files(s + end for s in stems for end in (".bin", ".idx", SUMS, ".docs"))
        for stem, writer, sums in zip(stems, self._writers, self._sums, strict=True):
            with self._stage.open(stem + ".idx") as out:
                writer.write_index(out)
            with self._stage.open(stem + SUMS, volatile=True) as out:
                sums.write(out)
            with self._stage.open(stem + ".docs", volatile=True) as out:
                join_provenance(self._parts, out, self._stage.scratch)
        self.totals.lines = {str(n): lines for n, lines in sorted(self._lines.items())}
        return self.totals


def check_bad_lines(
    config: TokenizeConfig, count: int, bad: dict[str, Any], place: Callable[[], str]
) -> None:
    """Refuse one bad line more than --max-bad-lines."""
    if config.max_bad_lines is not None and count > config.max_bad_lines:
        raise DataError(
            f"{place()}: {bad['reason']}{begins(bad['excerpt'])}. This is bad line number {count}, "
            f"and --max-bad-lines is {config.max_bad_lines}"
        )


def write_bad_line(out: OutputFile | None, bad: dict[str, Any]) -> None:
    """Add to the list of bad lines."""
    assert out is not None, "a bad line was skipped although it was to stop the run"
    out.write(json.dumps(bad).encode() + b"\n")


def refuse_nothing(config: TokenizeConfig, totals: Totals) -> None:
    """Refuse an output in which a key would have no token at all."""
    where = f"--input {' '.join(config.input)}"
    skipped = f" beside {totals.bad_lines} bad lines" if totals.bad_lines else ""
    if not totals.documents:
        raise DataError(f"{where}: there is no document in it{skipped}")
    for key, count in totals.tokens.items():
        if not count:
            raise DataError(
                f"{where}: key {key!r} is empty in all of {totals.documents} documents{skipped}"
            )
