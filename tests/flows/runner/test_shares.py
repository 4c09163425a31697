"""Fan-out: an output made in shares by jobs side by side; those that failed are made again."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flows.backends.spec import Shares
from flows.recipes.stage_job import StageJob, in_batches, in_shares, joined, num_shares, stage_job
from flows.runner import stage_task
from flows.runner.submission import SETTLED
from flows.stage_configs import CONFIGS
from flows.yard.profile import CAN_BE_SHARED, StageEnvironment
from trainyard.errors import TrainyardError
from trainyard.version import VERSION

DOCUMENT = {
    "input": ["a.jsonl"],
    "output_prefix": "out",
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 300,
}
FLOW_RUN = "0193e1f6-6f0c-7d4b-b0a5-1f2e3d4c5b6a"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageEnvironment:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)
    shares = {"tokenize": 4}
    return StageEnvironment(
        run_folder=str(tmp_path), backend="slurm", shares_by_stage=shares, shares_at_once=2
    )


def test_a_job_in_shares_and_the_one_that_joins_them() -> None:
    job = stage_job("tokenize", DOCUMENT, "test", "tokenize-a")
    shared, whole = in_shares(job, 4), joined(job, 4)
    assert (shared.name, shared.num_shares, shared.output) == ("tokenize-a-shares", 4, None)
    assert (whole.name, whole.num_shares, whole.output) == ("tokenize-a", 0, job.output)
    assert shared.document == whole.document == {**DOCUMENT, "world_size": 4}


def test_only_a_container_makes_no_shares(site: StageEnvironment) -> None:
    assert site.shares_of("tokenize") == 4
    assert site.shares_of("merge") == 1
    for backend, count in {"process": 4, "kubernetes": 4, "container": 1}.items():
        assert replace(site, backend=backend).shares_of("tokenize") == count


MERGE = {"input": ["parts"], "output_prefix": "out"}
DUMPS = {"source": "wikipedia", "input": ["dumps"], "output_dir": "out"}
VECTORS = {"embeddings": ["vectors"], "index": "index", "output_dir": "out"}


@pytest.mark.parametrize(
    ("stage", "document", "count"),
    [
        ("tokenize", DOCUMENT, 4),
        ("merge", MERGE, 4),
        ("merge", {**MERGE, "output_prefix": "s3://yard/out"}, 4),
        ("merge", {**MERGE, "virtual": True}, 1),
        ("collect", DUMPS, 4),
        ("collect", {**DUMPS, "source": "fetch"}, 1),
        ("collect", {"output_dir": "out"}, 1),
        ("faiss_add", VECTORS, 4),
        ("faiss_add", {**VECTORS, "retro_task_validate": 0.5}, 1),
    ],
)
def test_an_output_is_shared_out_unless_its_options_leave_nothing_to_divide(
    stage: str, document: dict[str, object], count: int
) -> None:
    assert num_shares(stage_job(stage, document, "test"), 4) == count


def test_every_stage_that_takes_a_share_can_be_shared_out() -> None:
    with_ranks = {stage for stage, config in CONFIGS.items() if {"rank", "world_size"} <= {
        one.name for one in fields(config)}}  # fmt: skip
    assert with_ranks == set(CAN_BE_SHARED)
    assert {"clean", "collect", "dedup", "decontaminate", "mix", "score"} <= with_ranks


def test_only_failed_shares_are_run_again(site: StageEnvironment) -> None:
    job = in_shares(stage_job("tokenize", DOCUMENT, "test"), 4)
    first = stage_task._prepare(job, site)
    assert first.shares == Shares(count=4, at_once=2)
    settled = {"kind": "node failure", "message": "", "shares": [1, 3]}
    Path(first.run_directory, SETTLED).write_text(json.dumps(settled))
    second = stage_task._prepare(job, site)
    assert second.run_directory != first.run_directory
    assert second.shares == Shares(count=4, only=(1, 3), at_once=2)


def test_a_process_makes_all_shares_again(site: StageEnvironment) -> None:
    job = in_shares(stage_job("tokenize", DOCUMENT, "test"), 4)
    here = replace(site, backend="process")
    for _ in range(2):
        assert stage_task._prepare(job, here).shares == Shares(count=4, at_once=2)


def test_a_job_without_shares_has_none(site: StageEnvironment) -> None:
    assert stage_task._prepare(stage_job("tokenize", DOCUMENT, "test"), site).shares is None


def test_a_stage_gets_the_version_of_its_flow(site: StageEnvironment) -> None:
    spec = stage_task._prepare(stage_job("tokenize", DOCUMENT, "test"), site)
    assert spec.environment == {"TRAINYARD_FLOW_VERSION": VERSION}


def jobs_of(count: int) -> list[StageJob]:
    """The jobs of some files of one corpus."""
    files = [{"input": [f"{n}.jsonl"], "output_prefix": f"parts/{n}"} for n in range(count)]
    return [stage_job("tokenize", DOCUMENT | one, "test", f"t-{n}") for n, one in enumerate(files)]


def test_many_files_share_a_job_and_few_do_not() -> None:
    assert in_batches(jobs_of(8), 8) == jobs_of(8)
    assert in_batches([], 8) == []
    batches = in_batches(jobs_of(20), 8)
    assert [job.num_runs for job in batches] == [3] * 6 + [2]
    assert len({job.name for job in batches}) == len(batches)
    assert {job.output for job in batches} == {None}
    runs = [{**job.document, **run} for job in batches for run in job.document["runs"]]
    for run in runs:
        del run["runs"]
    assert runs == [dict(job.document) for job in jobs_of(20)]
    assert [job.name for job in in_batches(jobs_of(20), 8)] == [job.name for job in batches]


def test_a_job_of_many_files_reports_each(site: StageEnvironment) -> None:
    (batch,) = in_batches(jobs_of(3), 1)
    spec = stage_task._prepare(batch, site)
    outcomes = [{"outcome": "noop"}, {"outcome": "ran"}]
    path = Path(spec.run_directory, "outcome.json")
    path.write_text(json.dumps({"outcome": "ran", "reason": "why", "runs": outcomes}))
    with pytest.raises(TrainyardError, match="reports 2 of 3 runs"):
        stage_task._summarise(batch, spec, 1.0)
    path.write_text(json.dumps({"outcome": "ran", "runs": [*outcomes, {"outcome": "ran"}]}))
    summary = stage_task._summarise(batch, spec, 1.0)
    assert (summary.num_runs, summary.reused) == (3, False)
    assert summary.metrics == {"outputs": 3, "made": 2}
