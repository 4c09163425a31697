"""Answers a question: from samples to documents and their sources, or from sources to samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from stages.blame.answer import Answer, Row, show
from stages.blame.config import BlameConfig
from stages.blame.run_description import RunDescription, describe
from stages.blame.sample_location import SampleLocations
from stages.blame.sources import Sidecars
from stages.runtime.context import StageRun
from trainyard.datasets.build import build_datasets
from trainyard.datasets.gpt import BlendedDataset, GPTDataset
from trainyard.datasets.index_cache import IN_MEMORY, IndexCache
from trainyard.datasets.sample_format import SampleFormat
from trainyard.datasets.serving_order import Place
from trainyard.datasets.trace import DocumentPiece, Occurrences, files_of, pieces
from trainyard.errors import ConfigError, DataError
from trainyard.training.loop.ledger import digest_samples

ANY = 0
"""Value for the end-of-document token and vocabulary size, which do not decide what a sample
contains."""


def run(config: BlameConfig, stage: StageRun) -> dict[str, Any]:
    """Print the answer."""
    question = _Question(config, describe(config))
    answer = question.of_samples() if config.source is None else question.of_source()
    show(answer, config.json)
    return {}


class _Question:
    def __init__(self, config: BlameConfig, run: RunDescription) -> None:
        self.config, self.run = config, run
        self.dataset = _training_data(run)
        self.locations = SampleLocations(run, len(self.dataset))
        files = files_of(self.dataset)
        self.sidecars = Sidecars({file.prefix: file.num_documents for file in files})

    # --- from samples -----------------------------------------------------------------------

    def of_samples(self) -> Answer:
        """--step or --sample."""
        if self.config.step is not None:
            found = self._of_step(self.config.step)
        else:
            assert self.config.sample is not None
            found = self._served([self.config.sample])
        rows = [
            self._row(place, piece)
            for place, sample in found
            for piece in pieces(self.dataset, sample)
        ]
        checked = self._check({place.step for place, _ in found if place is not None})
        return self._answer(rows, len(rows), checked)

    def _of_step(self, step: int) -> list[tuple[Place | None, int]]:
        if step > self.run.steps:
            raise ConfigError(f"--step {step}: the run has {self.run.steps}")
        wanted = [self.config.micro_batch, self.config.rank, self.config.row]
        segment = self.locations.segment(step)
        shape, size = segment.serving.shape, segment.serving.global_batch_size
        sizes = [size // shape.per_step, shape.dp, shape.micro_batch_size]
        for name, value, size in zip(("micro-batch", "rank", "row"), wanted, sizes, strict=True):
            if value is None:
                continue
            if not segment.is_known:
                raise ConfigError(
                    f"--{name} {value}: the number of data-parallel ranks of step {step} is not "
                    "recorded; give --data-parallel-size"
                )
            if not 0 <= value < size:
                raise ConfigError(
                    f"--{name} {value}: step {step} of this run has {size}, counted from 0"
                )
        return [
            (place, sample)
            for place, sample in self.locations.step(step)
            if all(w in (None, p) for w, p in zip(wanted, place[1:], strict=True))
        ]

    def _served(self, samples: list[int]) -> list[tuple[Place | None, int]]:
        """Every place that serves the samples; None for a sample that is never served."""
        places = self.locations.places(samples)
        found: list[tuple[Place | None, int]] = []
        for sample in samples:
            found += [(place, sample) for place in places[sample]] or [(None, sample)]
        return found

    # --- from a source ----------------------------------------------------------------------

    def of_source(self) -> Answer:
        """--source, with --line or --id."""
        config = self.config
        assert config.source is not None
        documents = self.sidecars.documents(config.source, config.line, config.id)
        found = Occurrences(self.dataset, documents)
        shown = found[: config.max_rows or len(found)]
        places: dict[int, list[tuple[Place | None, int]]] = {}
        for place, sample in self._served(sorted({piece.sample for piece in shown})):
            places.setdefault(sample, []).append((place, sample))
        rows = [self._row(place, piece) for piece in shown for place, _ in places[piece.sample]]
        rows = rows[: config.max_rows or len(rows)]
        checked = self._check({row.place.step for row in rows if row.place is not None})
        # A piece has a row for each place that serves its sample, and one row if none does.
        counts = self.locations.counts(found.samples)
        return self._answer(rows, int(np.maximum(counts, 1).sum()), checked)

    # --- for both ----------------------------------------------------------------------------

    def _answer(self, rows: list[Row], total: int, checked: int) -> Answer:
        self.locations.warn()
        shown = tuple(rows[: self.config.max_rows or len(rows)])
        prefixes = {row.piece.prefix for row in shown}
        return Answer(shown, total, checked, tuple(sorted(prefixes & self.sidecars.unchecked)))

    def _row(self, place: Place | None, piece: DocumentPiece) -> Row:
        origin = self.sidecars.origin(piece.prefix, piece.document)
        return Row(place, piece, origin, self.sidecars.collected(piece.prefix, origin))

    def _check(self, steps: Iterable[int]) -> int:
        """Compare the samples of the steps with the ledger; returns how many steps it has."""
        known = sorted(step for step in steps if step in self.run.ledger)
        for step in known:
            digest = digest_samples(self.dataset.ids(self.locations.samples(step)))
            if digest != self.run.ledger[step]:
                is_recorded = self.locations.segment(step).is_recorded
                hint = "" if is_recorded else "; check --data-parallel-size"
                raise DataError(
                    f"step {step}: the ledger of the run has samples {self.run.ledger[step]}, and "
                    f"these options and data give {digest}: an option or the data differs from the "
                    f"run{hint}"
                )
        return len(known)


def _training_data(run: RunDescription) -> GPTDataset | BlendedDataset:
    form = SampleFormat(run.seq_length, run.training.seed, vocab_size=ANY, eod=ANY)
    cache = run.data.data_cache_path
    indexer = IN_MEMORY if cache is None else IndexCache(cache, read_only=True)
    sizes = (run.length.samples, 0, 0)
    dataset = build_datasets(run.data, form, sizes, indexer, run.length.consumed).train
    assert isinstance(dataset, GPTDataset | BlendedDataset)
    return dataset
