"""plan --retro: what the steps of Retro take for any number of chunks, from small runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stages.plan.retro_config import RetroPlanConfig
from stages.plan.retro_run import run
from stages.plan.retro_sample import fit
from tests.stages.directly import run_directly
from tests.stages.test_report import make
from trainyard.artifacts.manifest import publish, read_manifest
from trainyard.artifacts.output import Output
from trainyard.errors import ConfigError

DIMENSIONS, LISTS, NPROBE = 64, 1024, 16


def write(folder: Path, stage: str, seconds: float, files: dict[str, str], **metrics: Any) -> None:
    """A finished step that took so long."""
    output = Output.directory(str(folder))
    make(output, stage, files, metrics=metrics)
    found = read_manifest(output.manifest_url)
    assert found is not None
    publish(output.manifest_url, replace(found[0], run={"seconds": seconds}), found[1])


def write_run(root: Path, chunks: int, lists: int = LISTS) -> str:
    """A run whose steps take 2 s each and something for each chunk."""
    vectors = LISTS * 40
    write(root / "db", "retro_db", 2 + chunks / 10_000, {"train.hdf5": "x" * (chunks // 100)},
          chunks=chunks)  # fmt: skip
    for name, count in (("sampled", vectors), ("train", chunks), ("samples", 500)):
        write(root / name, "retro_embed", 2 + count / 1000, {"block.hdf5": "x"}, chunks=count)
    work = 10.0 * vectors * lists * DIMENSIONS
    write(root / "empty", "faiss_train", 9.0, {"empty.faissindex": "x"},
          training_vectors=vectors, train_seconds=work / 1e10)  # fmt: skip
    index = {"num_vectors": chunks, "dimensions": DIMENSIONS, "num_lists": lists, "nprobe": NPROBE}
    adding = chunks * DIMENSIONS * lists / 1e10
    write(root / "index", "faiss_add", adding + chunks / 20_000,
          {"index.json": json.dumps({**index, "index_str": f"IVF{lists},SQ8"})},
          vectors=chunks, add_seconds=adding, list_imbalance=1.0)  # fmt: skip
    compared = lists * 4 * DIMENSIONS + NPROBE / max(lists, 1) * chunks * DIMENSIONS
    write(root / "query", "faiss_query", 5.0, {"neighbors.json": "{}"},
          milliseconds_per_query=compared / 1e6)  # fmt: skip
    return str(root)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    root = tmp_path_factory.mktemp("runs")
    return tuple(write_run(root / str(chunks), chunks) for chunks in (60_000, 90_000))


def plan(measured: tuple[str, ...], into: Path, **options: Any) -> dict[str, Any]:
    run_directly(RetroPlanConfig, run, retro_measured=measured, output_dir=str(into), **options)
    found: dict[str, Any] = json.loads((into / "retro_plan.json").read_text())
    return found


def seconds_of(document: dict[str, Any]) -> dict[str, float]:
    return {step["name"]: step["seconds"] for step in document["steps"]}


def test_a_size_that_follows_the_measured_law_takes_what_the_law_says(
    measured: tuple[str, ...], tmp_path: Path
) -> None:
    options = {"retro_index_ntrain": LISTS * 40, "retro_query_chunks": 700}
    found = plan(measured, tmp_path, retro_chunks=65_536, **options)
    assert (found["num_lists"], found["nprobe"]) == (LISTS, NPROBE)
    adding = 65_536 * DIMENSIONS * LISTS / 1e10 + 65_536 / 20_000
    query = (LISTS * 4 * DIMENSIONS + NPROBE / LISTS * 65_536 * DIMENSIONS) / 1e9
    assert seconds_of(found) == pytest.approx(
        {
            "retro_db": 2 + 65_536 / 10_000,
            "retro_embed, sampled": 2 + LISTS * 40 / 1000,
            "faiss_train": 10 * 40 * LISTS * LISTS * DIMENSIONS / 1e10,
            "retro_embed, train": 2 + 65_536 / 1000,
            "faiss_add": adding,
            "retro_embed, samples": 2 + 0.7,
            "faiss_query": 700 * query,
        },
        rel=1e-3,
    )
    disk = {step["name"]: step["disk_gb"] * 1e9 for step in found["steps"]}
    assert disk["retro_db"] == pytest.approx(655, rel=0.01)
    assert disk["retro_embed, train"] == 65_536 * 4 * DIMENSIONS
    assert disk["faiss_query"] == 700 * 12 * 20


def test_a_billion_chunks_are_spread_over_nodes_where_a_step_can_be(
    measured: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(measured, tmp_path, retro_chunks=10**9, hours=8, node_memory_gb=64)
    assert found["index_str"] == "OPQ64_64,IVF65536_HNSW32,PQ64"
    steps = {step["name"]: step for step in found["steps"]}
    embedding = steps["retro_embed, train"]
    assert embedding["nodes"] == 35  # 10**6 s in shares of 8 h
    assert [steps[name]["nodes"] for name in ("retro_db", "faiss_train")] == [1, 1]
    query = steps["faiss_query"]
    assert query["nodes"] == math.ceil(query["seconds"] / (8 * 3600)) > 1
    assert steps["faiss_add"]["memory_gb"] == pytest.approx(0.5 + 72, abs=0.1)
    printed = capsys.readouterr().out
    assert "retro_db: takes more than 8 h, and one node does all of it" in printed
    assert "faiss_add: needs more than 64 GB of memory; takes more than 8 h" in printed
    assert "1,000,000,000 chunks" in printed


def test_adding_is_shared_and_its_end_is_not(measured: tuple[str, ...], tmp_path: Path) -> None:
    found = plan(measured, tmp_path, retro_chunks=10**9, hours=24)
    (add,) = (step for step in found["steps"] if step["name"] == "faiss_add")
    assert add["alone"] == pytest.approx(10**9 / 20_000)  # 13.9 h of recall and writing
    shared = add["seconds"] - add["alone"]
    assert (
        shared / add["nodes"] + add["alone"]
        <= 24 * 3600
        < shared / (add["nodes"] - 1) + add["alone"]
    )


def test_more_chunks_take_more_of_everything(measured: tuple[str, ...], tmp_path: Path) -> None:
    sizes = [10**exponent for exponent in range(5, 10)]
    plans = [plan(measured, tmp_path / str(n), retro_chunks=n)["steps"] for n in sizes]
    for smaller, larger in pairwise(plans):
        for before, after in zip(smaller, larger, strict=True):
            assert after["seconds"] > before["seconds"], before["name"]
            assert after["disk_gb"] > before["disk_gb"], before["name"]


def test_runs_that_say_too_little_are_refused(tmp_path: Path) -> None:
    flat = write_run(tmp_path / "flat", 30_000, lists=0)
    with pytest.raises(ConfigError, match=r"no finished faiss_train or faiss_add or faiss_query"):
        plan((flat,), tmp_path, retro_chunks=10**6)
    with pytest.raises(ConfigError, match=r"--retro-measured names no run to scale"):
        RetroPlanConfig(retro_chunks=1, retro_measured=())


@pytest.mark.parametrize(
    ("points", "fixed", "each"),
    [
        ([(1, 5.0), (3, 9.0), (10, 23.0)], 3.0, 2.0),
        ([(4, 8.0)], 0.0, 2.0),
        ([(4, 8.0), (4, 8.0)], 0.0, 2.0),
        ([(1, 1.0), (10, 20.0)], 0.0, 1.2),  # no step takes less than nothing
    ],
)
def test_a_line_goes_through_points_and_never_below_zero(
    points: list[tuple[float, float]], fixed: float, each: float
) -> None:
    line = fit(points)
    assert (line.fixed, line.each) == pytest.approx((fixed, each))
