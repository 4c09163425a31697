"""Build the datasets of a run with a cache that is the output of this stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any

from stages.index.config import IndexConfig
from stages.runtime.context import StageRun
from trainyard.artifacts.store import FileRecord
from trainyard.datasets.arrays import Arrays, Pieces
from trainyard.datasets.build import build_datasets
from trainyard.datasets.index_cache import (
    IndexCache,
    array_name,
    document_name,
    write_entry,
)
from trainyard.datasets.sample_format import SampleFormat
from trainyard.training.loop.length import sample_counts

log = logging.getLogger(__name__)

ANY = 0
"""Placeholder for the end of document and the vocabulary: they never change indices."""


def run(config: IndexConfig, stage: StageRun) -> dict[str, Any]:
    """Build the indices of the run; returns their sizes."""
    sample_format = SampleFormat(config.seq_length, config.seed, vocab_size=ANY, eod=ANY)
    sizes, consumed = sample_counts(config)
    entries = OutputEntries(stage)
    built = build_datasets(config.data, sample_format, sizes, entries, consumed)
    return {
        "train_samples": len(built.train) if built.train is not None else 0,
        "valid_samples": sum(len(dataset) for _, dataset in built.valid),
        "test_samples": sum(len(dataset) for _, dataset in built.test),
        "indices": len(entries.keys),
        "size_bytes": sum(record.size_bytes for record in stage.records.values()),
    }


class OutputEntries(IndexCache):
    """A cache whose entries are files of the output, those that a killed run finished included."""

    def __init__(self, stage: StageRun) -> None:
        assert stage.output is not None
        super().__init__(stage.output.url)
        self._stage = stage
        self._writing = Lock()  # --num-dataset-builder-threads build side by side
        self.keys: set[str] = set()

    def largest_token(self, facts: Mapping[str, Any], scan: Callable[[], Arrays]) -> Arrays | None:
        """The largest token, which this stage always computes."""
        return self.arrays(facts, scan)

    def find(self, key: str) -> Arrays | None:
        """An entry of this run, or of a killed run of the same inputs, options and code."""
        if key in self.keys:
            return super().find(key)
        unit = self._stage.work.published(key)
        found = super().find(key) if unit is not None else None
        if unit is None or found is None:
            return None
        with self._writing:
            for record in unit["files"]:
                self._stage.record(FileRecord(**record))
            self.keys.add(key)
        return found

    def keep(self, key: str, facts: Mapping[str, Any], made: Pieces) -> Arrays:
        """Write an entry; a fault ends the stage."""
        names = [*(array_name(key, name) for name in made.shapes), document_name(key)]
        with self._writing:
            self._stage.begin_files(names)
            write_entry(self._stage.open, key, facts, made)
            self.keys.add(key)
            files = [asdict(self._stage.records[name]) for name in names]
            self._stage.work.publish(key, {"files": files})
        log.info("built index %s function=%s", key[:8], facts["function"])
        return self.kept(key, made)
