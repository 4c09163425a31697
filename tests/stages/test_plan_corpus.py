"""plan --corpus: how long machines take to prepare a corpus, and what limits them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.plan.corpus_config import CorpusPlanConfig
from stages.plan.corpus_model import Corpus, Fleet, Rates, _Cut, forecast
from stages.plan.corpus_rates import DIGEST_SECONDS_PER_MB, PROGRAM_SECONDS
from stages.plan.corpus_run import run
from stages.runtime.share_digests import SHARES_LINEAGE
from tests.stages.directly import run_directly, run_program
from tests.stages.test_report import make
from trainyard.artifacts.manifest import publish, read_manifest
from trainyard.artifacts.output import Output
from trainyard.corpus.units import InputFile, plan_units, share_of
from trainyard.errors import ConfigError

MB, GB = 1e6, 1e9

FAST = Rates(
    start_seconds=0.0,
    file_seconds=0.0,
    tokenize_mb_per_second=50.0,
    output_ratio=0.5,
    machine_mb_per_second=math.inf,
    join_seconds=0.0,
    join_piece_seconds=0.0,
    join_mb_per_second=math.inf,
)
"""Only cores take time."""


def shared(machines: int, cores: int = 4, **more: Any) -> Fleet:
    """Machines of one process each, which makes a share."""
    given = {"workers": cores, "shares": machines, **more}
    return Fleet(machines=machines, cores=cores, **given)


@pytest.mark.parametrize(("world_size", "num_files"), [(1, 1), (3, 1), (7, 2), (5, 40)])
def test_a_corpus_is_cut_as_tokenize_cuts_it(
    tmp_path: Path, world_size: int, num_files: int
) -> None:
    size = 400 << 20
    file = tmp_path / "a.txt.gz"  # a whole unit
    line = tmp_path / "a.jsonl"
    for path in (file, line):
        with path.open("wb") as out:
            out.truncate(size // num_files)
    for path, is_whole in ((file, True), (line, False)):
        files = [InputFile(str(path), size // num_files)] * num_files
        units = plan_units(files, world_size=world_size)
        most = max(len(share_of(units, rank, world_size)) for rank in range(world_size))
        cut = _Cut.of(Corpus(size_bytes=size, num_files=num_files, whole_files=is_whole),
                      shared(world_size))  # fmt: skip
        assert (cut.units, cut.units_a_piece) == (len(units), most)
        assert cut.unit_bytes == max(unit.size_bytes for unit in units)


def test_no_fleet_beats_its_cores_and_more_machines_work_no_longer() -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        corpus = Corpus(
            size_bytes=float(10 ** random.uniform(8, 13)),
            num_files=int(10 ** random.uniform(0, 4)),
            whole_files=bool(random.integers(2)),
        )
        cores, by_file = int(2 ** random.integers(7)), bool(random.integers(2))
        rates = replace(FAST, machine_mb_per_second=float(10 ** random.uniform(2, 4)))
        works = []
        for machines in (1, 10, 100, 1000):
            shares = None if by_file else machines
            found = forecast(corpus, shared(machines, cores, shares=shares), rates)
            assert found.work_seconds >= corpus.size_bytes / (machines * cores * 50 * MB) * 0.999
            assert found.seconds == found.start_seconds + found.work_seconds + found.join_seconds
            works.append(found.work_seconds)
        # A worker may have a unit more than before: pieces of other sizes are cut anew.
        unit = min(32 << 20, corpus.size_bytes) / (50 * MB)
        for fewer, more in pairwise(works):
            assert more <= fewer * 1.001 + unit


@pytest.mark.parametrize(
    "name", ["tokenize_mb_per_second", "machine_mb_per_second", "store_mb_per_second",
             "requests_per_second", "join_mb_per_second"],
)  # fmt: skip
def test_a_faster_rate_never_takes_longer(name: str) -> None:
    rates = replace(
        FAST, start_seconds=1, machine_mb_per_second=700, store_mb_per_second=20_000,
        request_seconds=0.02, requests_per_second=3500, join_mb_per_second=600,
        join_piece_seconds=0.003, join_piece_requests=34,
    )  # fmt: skip
    corpus = Corpus(size_bytes=1e12, num_files=100)
    for machines in (1, 10, 100, 1000):
        seconds = [
            forecast(corpus, shared(machines), replace(rates, **{name: rate})).seconds
            for rate in (10, 100, 1000, 10_000, math.inf)
        ]
        assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("corpus", "fleet", "rates", "bottleneck", "seconds"),
    [
        ({}, shared(10), {}, "CPU", 500),
        # Twice the cores' text is read and written, by the link of each machine.
        ({}, shared(10), {"machine_mb_per_second": 100}, "bandwidth of a machine", 2000),
        ({}, shared(10), {"store_mb_per_second": 500}, "bandwidth of the store", 4000),
        ({}, shared(10), {"join_mb_per_second": 50}, "join", 500 + 10_000),
        ({}, shared(10), {"join_piece_seconds": 100}, "join", 500 + 1000),
        ({}, shared(10), {"start_seconds": 600}, "start", 600 + 500),
        ({}, shared(10, processes=2, shares=4, workers=2), {}, "shares", 2500),
        ({}, shared(10, shares=15), {}, "CPU", 2 * 1000 / 3),
        ({"num_files": 12, "whole_files": True}, shared(10, shares=12), {}, "units", 3333),
        ({"num_files": 4}, shared(10, shares=None), {}, "files", 1250),
        ({"num_files": 10**6}, shared(10), {"requests_per_second": 1000}, "requests", 20_000),
    ],
)
def test_the_bottleneck_is_what_most_time_is_lost_to(
    corpus: dict[str, Any], fleet: Fleet, rates: dict[str, float], bottleneck: str, seconds: float
) -> None:
    """A terabyte, ten machines of four cores."""
    found = forecast(Corpus(size_bytes=1e12, **corpus), fleet, replace(FAST, **rates))
    assert found.bottleneck == bottleneck, found.lost
    assert found.seconds == pytest.approx(seconds, rel=0.05)


def test_processes_share_the_cores_of_their_machine() -> None:
    corpus = Corpus(size_bytes=1e10)

    def work(processes: int) -> float:
        fleet = Fleet(machines=1, cores=2, processes=processes, shares=processes)
        return forecast(corpus, fleet, FAST).work_seconds

    assert work(1) == pytest.approx(200, rel=0.01)
    assert work(2) == pytest.approx(100, rel=0.01)
    assert work(4) == pytest.approx(100, rel=0.01)


# --- measured runs --------------------------------------------------------------------------------


def write(prefix: Path, stage: str, megabytes: float, seconds: float, **facts: Any) -> None:
    """A finished run that took so long and wrote four bytes for each MB."""
    output = Output.prefix(str(prefix))
    make(output, stage, {"_text_document.bin": "x" * int(4 * megabytes)},
         metrics={"input_bytes": megabytes * MB})  # fmt: skip
    found = read_manifest(output.manifest_url)
    assert found is not None
    run = {"seconds": seconds - PROGRAM_SECONDS, **facts}
    publish(output.manifest_url, replace(found[0], run=run), found[1])


def plan(tmp_path: Path, **options: Any) -> dict[str, Any]:
    run_directly(CorpusPlanConfig, run, output_dir=str(tmp_path / "plan"), **options)
    found: dict[str, Any] = json.loads((tmp_path / "plan/corpus_plan.json").read_text())
    return found


def test_runs_of_two_sizes_replace_the_benchmarks(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for megabytes in (100, 400):
        digest = DIGEST_SECONDS_PER_MB * megabytes
        write(runs / f"a{megabytes}", "tokenize", megabytes, 3 + megabytes / 80 - digest,
              workers=2)  # fmt: skip
    write(runs / "joined", "tokenize", 400, 2.0, **{SHARES_LINEAGE: "0" * 64})
    rates = plan(tmp_path, corpus_gb=10, corpus_measured=(str(runs),))["rates"]
    assert rates["start_seconds"] == pytest.approx(3)
    assert rates["tokenize_mb_per_second"] == pytest.approx(40)
    assert rates["output_ratio"] == pytest.approx(4e-6)
    assert rates["join_mb_per_second"] == pytest.approx(1600e-6 / (2.0 - rates["join_seconds"]))


def test_a_run_of_one_size_starts_as_long_as_the_benchmarks(tmp_path: Path) -> None:
    start = plan(tmp_path, corpus_gb=10)["rates"]["start_seconds"]
    write(tmp_path / "one", "tokenize", 100, start + 2.44, workers=1)
    given = (str(tmp_path / "one.manifest.json"),)
    rates = plan(tmp_path, corpus_gb=10, corpus_measured=given)["rates"]
    assert rates["start_seconds"] == start
    assert rates["tokenize_mb_per_second"] == pytest.approx(40)
    rates = plan(tmp_path, corpus_gb=10, corpus_measured=given, tokenize_mb_per_second=7)["rates"]
    assert rates["tokenize_mb_per_second"] == 7


def test_a_run_of_tokenize_says_what_the_plan_needs(tmp_path: Path) -> None:
    text = tmp_path / "numbers.jsonl"
    text.write_text('{"text": "1 2 3"}\n' * 1000)
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--workers", "1")
    words = ("--input", str(text), "--output-prefix", str(tmp_path / "runs/a"), *null)
    run_program("stages.tokenize", *words, expect=0)
    measured = ("--corpus-measured", str(tmp_path / "runs"))
    done = run_program("stages.plan", "--corpus", "--corpus-gb", "1", "--json", *measured, expect=0)
    files = [path for path in (tmp_path / "runs").iterdir() if "manifest" not in path.name]
    size = sum(path.stat().st_size for path in files)
    rates = json.loads(done.out)["rates"]
    assert rates["output_ratio"] == pytest.approx(size / text.stat().st_size)


def test_a_table_names_the_bottleneck_of_each_number_of_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"corpus_gb": 10_000, "corpus_files": 1000, "cores": 8}
    found = plan(tmp_path, **options)["forecasts"]
    assert [one["machines"] for one in found] == [1, 10, 100, 1000]
    assert [one["bottleneck"] for one in found] == ["CPU", "join", "join", "join"]
    printed = capsys.readouterr().out
    assert "10,000 GB of text in 1,000 files, 8 cores a machine" in printed
    assert "join: one process joins the parts; --join virtual copies nothing" in printed
    listed = plan(tmp_path, **options, join="virtual")["forecasts"]
    assert [one["bottleneck"] for one in listed] == ["CPU", "CPU", "CPU", "CPU"]
    assert listed[2]["seconds"] < found[2]["seconds"] / 10


def test_wrong_options_and_runs_that_say_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--shares 8 needs --join shares: with --join virtual"):
        CorpusPlanConfig(corpus_gb=1, shares=8, join="virtual")
    with pytest.raises(ConfigError, match=r"--machines 0 x --processes 1: at least 1 and at most"):
        CorpusPlanConfig(corpus_gb=1, machines=(4, 0))
    with pytest.raises(ConfigError, match=r"--corpus-gb must be above 0, got 0"):
        CorpusPlanConfig(corpus_gb=0)
    write(tmp_path / "runs/old", "tokenize", 100, 3.0)
    with pytest.raises(ConfigError, match=r"no finished run of tokenize that was made at once"):
        plan(tmp_path, corpus_gb=1, corpus_measured=(str(tmp_path / "runs"),))
