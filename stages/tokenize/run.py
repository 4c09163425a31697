"""Cut the input into units, tokenize those that are not done yet, lay them end to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from stages.context import StageRun
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.unit import Unit, cached_tokenizer, tokenize_unit
from trainyard.artifacts import store
from trainyard.corpus.documents import check_inputs, split_ranges
from trainyard.corpus.merge import merge_index, merge_tokens, survey
from trainyard.corpus.workers import run_jobs
from trainyard.errors import DataError

log = logging.getLogger(__name__)

UNIT_BYTES = 8 << 20
"""Input a unit reads: what a kill can cost a worker, some seconds. No effect on the output."""


def run(config: TokenizeConfig, stage: StageRun) -> dict[str, Any]:
    """Write PREFIX_KEY_document.bin and .idx for every key."""
    files = stage.inputs["input"].files
    check_inputs(config.input, files, config.json_keys)
    cached_tokenizer(config.tokenizer)  # what is wrong with it is told before any work
    units = plan_units(config, files, stage)
    results = _tokenize(config, units, stage)
    documents = sum(result["documents"] for result in results)
    tokens = {
        key: sum(result["tokens"][k] for result in results)
        for k, key in enumerate(config.json_keys)
    }
    _refuse_nothing(config, documents, tokens)
    for k, key in enumerate(config.json_keys):
        _assemble([unit.targets[k] for unit in units], f"_{key}_document", stage)
    return {"documents": documents, "tokens": tokens, "input_bytes": _size(units)}


def plan_units(config: TokenizeConfig, files: Sequence[str], stage: StageRun) -> list[Unit]:
    """The units of all files, in the order of the output."""
    units = []
    for position, url in enumerate(files):
        size = store.info(url).size_bytes
        if size == 0:
            log.warning("%s is empty", url)
        for source in split_ranges(url, size, UNIT_BYTES):
            name = f"{position:06d}-{source.start:015d}-{source.end:015d}"
            targets = tuple(stage.work.url(f"{name}.{k}") for k in range(len(config.json_keys)))
            units.append(
                Unit(name, source, targets, config.json_keys, config.append_eod, config.tokenizer)
            )
    return units


def _tokenize(config: TokenizeConfig, units: list[Unit], stage: StageRun) -> list[dict[str, Any]]:
    results = {unit.name: stage.work.published(unit.name) for unit in units}
    todo = [unit for unit in units if results[unit.name] is None]
    if len(todo) < len(units):
        log.info("going on: units_done=%d units=%d", len(units) - len(todo), len(units))
    done_bytes = _size(units) - _size(todo)
    speed = _Speed(config.log_interval)
    workers = {"TOKENIZERS_PARALLELISM": "false"}
    with stage.progress(_size(units), "bytes", "tokenize", start=done_bytes) as progress:
        for unit, result in run_jobs(tokenize_unit, todo, config.workers, workers):
            stage.work.publish(unit.name, result)
            results[unit.name] = result
            progress.update(unit.source.size_bytes)
            speed.add(result["documents"], unit.source.size_bytes)
    return [result for result in results.values() if result is not None]


class _Speed:
    """A line of progress every so many documents, as Megatron's tool prints."""

    def __init__(self, log_interval: int) -> None:
        self._interval = log_interval
        self._documents = self._bytes = 0
        self._began = time.monotonic()

    def add(self, documents: int, size_bytes: int) -> None:
        """Some more is done."""
        before = self._documents // self._interval
        self._documents += documents
        self._bytes += size_bytes
        if self._documents // self._interval > before:
            seconds = max(time.monotonic() - self._began, 1e-9)
            log.info(
                "tokenized documents=%d documents_per_second=%.0f mb_per_second=%.2f",
                self._documents,
                self._documents / seconds,
                self._bytes / seconds / 1e6,
            )


def _refuse_nothing(config: TokenizeConfig, documents: int, tokens: dict[str, int]) -> None:
    where = f"--input {' '.join(config.input)}"
    if not documents:
        raise DataError(f"{where}: there is no document in it")
    for key, count in tokens.items():
        if not count:
            raise DataError(f"{where}: key {key!r} is empty in all of {documents} documents")


def _assemble(prefixes: list[str], name: str, stage: StageRun) -> None:
    parts = survey(prefixes, stage.scratch)
    with stage.open(name + ".bin") as out:
        merge_tokens(parts, out)
    with stage.open(name + ".idx") as out:
        merge_index(parts, stage.scratch, out)


def _size(units: Sequence[Unit]) -> int:
    return sum(unit.source.size_bytes for unit in units)
