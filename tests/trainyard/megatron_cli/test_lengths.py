"""Splits, numbers of steps and served samples against those of Megatron core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.megatron_cli import core_program
from tests.vectors import GOLDEN
from trainyard.corpus.indexed import IndexedWriter
from trainyard.datasets.build import build_datasets
from trainyard.datasets.config import DataConfig, parse_split
from trainyard.datasets.gpt import SampleFormat
from trainyard.datasets.splits import split_documents
from trainyard.errors import ConfigError
from trainyard.training.loop.batch_size import BatchSizeSchedule, build_batch_size_schedule

CORE = core_program
FORM = SampleFormat(CORE.SEQ_LENGTH, CORE.SEED, CORE.VOCAB_SIZE, CORE.EOD)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "megatron_lengths.json").read_text())
    return found


def numpys(split: str) -> list[tuple[float, float] | None]:
    """The bounds by the published rule: parts over their numpy sum, added up one by one."""
    parts = np.array([float(part) for part in split.split(",")], np.float64)
    first, second, third = (parts / np.sum(parts)).tolist()
    bounds = [(0, first), (first, first + second), (first + second, first + second + third)]
    return [bound if bound[0] < bound[1] else None for bound in bounds]


def ours(split: str) -> list[tuple[float, float] | None]:
    return [bound if bound[0] < bound[1] else None for bound in parse_split(split)]


@pytest.mark.slow
def test_fractional_splits_cut_at_megatrons_documents(golden: dict[str, Any]) -> None:
    assert CORE.split_digests(ours) == golden["splits"]
    assert CORE.split_digests(numpys) == golden["splits"]
    cut = [split_documents(15, bound) for bound in parse_split("0.7,0.2,0.1")]
    assert [len(documents) for documents in cut] == [11, 3, 1]


def test_a_ramp_has_megatrons_steps(golden: dict[str, Any]) -> None:
    found = []
    for start, increment, samples, final, total in CORE.ramps():
        ramp = build_batch_size_schedule(
            global_batch_size=final,
            micro_batch_size=1,
            dp=1,
            rampup_batch_size=(start, increment, samples),
        )
        found.append(ramp.iterations_to(total))
    assert found == golden["ramps"]


def table(text: str, seq_length: int) -> BatchSizeSchedule:
    return build_batch_size_schedule(
        global_batch_size=None,
        micro_batch_size=1,
        dp=1,
        seq_length=seq_length,
        step_batch_size_schedule=text,
    )


def check_table(case: tuple[str, int, int], sizes: list[tuple[int, int]], steps: int) -> None:
    text, seq_length, total = case
    ours = table(text, seq_length)
    assert ours.iterations_to(total) == steps, case
    for (begin, size), before in zip(sizes, [sizes[0], *sizes], strict=False):
        assert ours.at(begin).global_batch_size == size, (case, begin)
        assert ours.at(max(0, begin - 1)).global_batch_size == before[1], (case, begin)


def test_a_table_has_megatrons_batches_and_steps(golden: dict[str, Any]) -> None:
    for case, (sizes, steps) in zip(CORE.tables(), golden["tables"], strict=True):
        check_table(case, sizes, steps)


def test_a_table_is_accepted_or_refused_as_by_megatron(golden: dict[str, Any]) -> None:
    for text, recorded in zip(CORE.odd_tables(), golden["odd tables"], strict=True):
        if recorded is None:
            with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
                table(text, 100)
        else:
            check_table((text, 100, 5000), *recorded)


# --- samples ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokens")
    for name, documents in CORE.token_files().items():
        with (
            (made / f"{name}.bin").open("wb") as bin_file,
            (made / f"{name}.idx").open("wb") as idx_file,
        ):
            writer = IndexedWriter(bin_file, np.uint16)
            for document in documents:
                writer.add_document([document])
            writer.write_index(idx_file)
    return made


def data_config(folder: Path, options: dict[str, Any]) -> DataConfig:
    kept = {name: value for name, value in options.items() if name != "sizes"}
    for name, words in kept.items():
        if isinstance(words, list):
            kept[name] = tuple(str(folder / w) if w in CORE.FILES else w for w in words)
    return DataConfig(**kept)


@pytest.mark.parametrize("name", CORE.datasets())
def test_splits_serve_megatrons_samples(golden: dict[str, Any], folder: Path, name: str) -> None:
    options = CORE.datasets()[name]
    built = build_datasets(data_config(folder, options), FORM, options["sizes"])
    sets = {"train": [built.train], "valid": [s for _, s in built.valid]}
    sets["test"] = [dataset for _, dataset in built.test]
    served = {
        split: [CORE.served(list(one.__getitems__(range(len(one)))["tokens"])) for one in found]
        for split, found in sets.items()
    }
    assert served == golden["datasets"][name]


# --- the real one -------------------------------------------------------------------------------


RELEASES = {
    "0.16.1": {"splits", "datasets"},
    "0.17.1": {"splits", "datasets", "ramps"},
    "0.19.2": {"splits", "datasets", "tables", "odd tables"},
}
"""And what is asked of each: `update_train_iters` is in the packages from 0.17 on."""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", RELEASES)
def test_megatron_does_what_was_recorded(
    golden: dict[str, Any], tmp_path: Path, version: str
) -> None:
    out = tmp_path / "found.json"
    megatron_package.run(version, Path(CORE.__file__), [str(out)])
    found = json.loads(out.read_text())
    assert set(found) == RELEASES[version]
    for name, recorded in found.items():
        assert recorded == golden[name], name
