"""The pages of a stage, and its progress by the lines of its log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import subprocess
import sys
import tracemalloc
from pathlib import Path

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from flows.backends.outcome import Kind, Outcome
from flows.backends.spec import LaunchSpec
from flows.pages import progress
from flows.pages.progress import LogProgress, progress_shown, share_done
from flows.pages.stage_pages import (
    failed_rows,
    has_pages,
    page_key,
    reason_of,
    shell_command,
    show_stage,
    shown,
    stage_rows,
    submitted,
)
from flows.recipes.summary import Summary
from trainyard.artifacts.manifest import InputRecord, Manifest
from trainyard.artifacts.store import FileRecord
from trainyard.errors import InfrastructureError

SUMMARY = Summary(
    job="merge",
    stage="merge",
    reused=False,
    reason="input a changed",
    seconds=1.26,
    metrics={"tokens": 1234567, "device": "cpu"},
    manifest_url="/yard/tokens.manifest.json",
    log="/runs/merge/1/log.txt",
)


def test_the_table_of_a_stage_has_inputs_output_metrics_and_the_reason_why_it_ran() -> None:
    urls = tuple(f"/yard/part-{i}" for i in range(5))
    manifest = Manifest(
        stage="merge",
        code={"version": "0.1", "digest": "c" * 64},
        inputs={"input": InputRecord(urls, "a" * 64)},
        files=(FileRecord(".bin", 2_000, "b" * 64), FileRecord(".idx", 34, "d" * 64)),
    )
    rows = {row["what"]: row for row in stage_rows(SUMMARY, manifest)}
    assert rows["stage merge"]["value"] == "done in 1.3 s"
    assert rows["why it ran"]["value"] == "input a changed"
    assert rows["input input"]["value"] == "/yard/part-0, /yard/part-1, /yard/part-2 and 2 more"
    assert rows["input input"]["digest"] == "a" * 12
    assert rows["output"]["digest"] == manifest.output_digest[:12]
    assert rows["files"]["value"] == "2, of 2,034 bytes together"
    assert rows["metric tokens"]["value"] == "1,234,567"
    assert rows["metric device"]["value"] == "cpu"
    assert {tuple(row) for row in rows.values()} == {("what", "digest", "value")}


def test_a_stage_without_an_output_has_a_table_too() -> None:
    reused = Summary(job="verify", stage="verify", reused=True, reason="", seconds=0.1)
    assert [row["what"] for row in stage_rows(reused, None)] == ["stage verify", "log"]


def test_the_table_of_a_failed_stage_has_the_kind_of_failure_and_its_log() -> None:
    outcome = Outcome(
        name="pretrain",
        kind=Kind.NODE_FAILURE,
        exit_status=3,
        message="node n2 is down",
        error="DistNetworkError",
        step=1200,
        failed_shares=(1, 3),
    )
    rows = failed_rows("pretrain", outcome, 61.25, "/runs/pretrain/1/log.txt")
    assert {row["what"]: row["value"] for row in rows} == {
        "stage pretrain": "failed after 61.2 s: node failure",
        "message": "node n2 is down",
        "error": "DistNetworkError",
        "last finished step": "1,200",
        "shares that failed": "1, 3",
        "log": "/runs/pretrain/1/log.txt",
    }
    short = failed_rows("merge", Outcome(name="m", kind=Kind.UNKNOWN, exit_status=3), 1, "l")
    assert [row["what"] for row in short] == ["stage merge", "log"]


def test_command_names_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a yard").mkdir()
    monkeypatch.chdir(tmp_path / "a yard")
    spec = LaunchSpec(name="job", command=("pwd",), run_directory=str(tmp_path))
    command = ["sh", "-c", shell_command(spec)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.stdout == f"{(tmp_path / 'a yard').resolve()}\n"


def test_the_command_of_a_process_can_be_run_again_by_hand(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['COLOUR'], sys.argv[1])"
    spec = LaunchSpec(
        name="job",
        command=(sys.executable, "-c", code, "it's $HOME"),
        run_directory=str(tmp_path),
        working_directory=str(tmp_path),
        environment={"COLOUR": "dark red"},
    )
    done = subprocess.run(["sh", "-e", "-c", shell_command(spec)], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path.resolve()} dark red it's $HOME\n"
    assert shlex.quote("it's $HOME") in shell_command(spec)


def test_the_submitted_script_is_shown_unchanged(tmp_path: Path) -> None:
    spec = LaunchSpec(name="job", command=("echo", "a b"), run_directory=str(tmp_path))
    assert submitted(spec) == f"```bash\ncd {shlex.quote(os.getcwd())}\necho 'a b'\n```\n"
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\n")
    assert submitted(spec).endswith("```bash\n#!/bin/bash\n#SBATCH --nodes=2\n```\n")


def test_names_of_pages_are_ones_that_prefect_takes() -> None:
    assert page_key("tokenize-Train_0.x", "script") == "tokenize-train-0-x-script"


def test_a_page_that_cannot_be_saved_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def away() -> None:
        raise InfrastructureError("the store is away")

    async def wrong() -> None:
        raise KeyError("ours")

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(shown(away())) is None
    assert "the store is away" in caplog.text
    with pytest.raises(KeyError):
        asyncio.run(shown(wrong()))


def answered(status: int, body: bytes) -> PrefectHTTPStatusError:
    """What Prefect's client raises of such an answer."""
    asked = httpx.Request("POST", "http://127.0.0.1:4200/api/artifacts/")
    answer = httpx.Response(status, content=body, request=asked)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        answer.raise_for_status()
    return PrefectHTTPStatusError.from_httpx_error(caught.value)


@pytest.mark.parametrize("status", [503, 507])
def test_refused_page_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int) -> None:
    words = "the database cannot be written"
    error = answered(status, json.dumps({"detail": words}).encode())
    assert len(str(error)) > len(words) + 100

    async def refused() -> None:
        raise error

    asyncio.run(shown(refused()))
    assert caplog.messages == [f"could not write a page of this run: {words}"]


@pytest.mark.parametrize("body", [b"", b"<html>away</html>", b"[]", b'{"detail": [{"loc": 1}]}'])
def test_an_answer_without_a_message_is_named_by_its_status(body: bytes) -> None:
    assert reason_of(answered(502, body)) == "Prefect's server answered 502 Bad Gateway"


def test_another_error_is_one_line_with_its_class() -> None:
    error = httpx.ConnectError("all attempts failed\n" + "and again " * 100)
    line = reason_of(error)
    assert line.startswith("ConnectError: all attempts failed and again")
    assert len(line) < 200


def test_without_a_flow_there_are_no_pages(tmp_path: Path) -> None:
    assert not has_pages()
    asyncio.run(show_stage(SUMMARY))  # would ask a server

    async def inside() -> str:
        spec = LaunchSpec(name="job", command=("true",), run_directory=str(tmp_path))
        async with progress_shown(spec):
            return "done"

    assert asyncio.run(inside()) == "done"


# --- progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "done"),
    [
        (" [2026-11-21 18:00:00] iteration      150/     400 | lm loss: 5.1E+00", 0.375),
        ("18:00:01 info    tokenize: 1,200 of 4,000 documents (30 %), 400 documents/s, 7 s", 0.3),
        ("iteration 500/ 400 |", 1.0),
        ("iteration 1/ 0 |", None),
        ("saved checkpoint step=100 of 400", None),
        ("merge: 12 documents, 4 documents/s", None),
    ],
)
def test_lines_say_how_far_a_stage_is(line: str, done: float | None) -> None:
    assert share_done(line) == done


def test_a_log_is_read_once(tmp_path: Path) -> None:
    progress_of_job, log = LogProgress(tmp_path), tmp_path / "log.txt"
    assert progress_of_job.read() is None
    log.write_text("begins\niteration 1/ 4 |\niteration 2")
    assert progress_of_job.read() == 0.25
    with log.open("a") as file:
        file.write("/ 4 |\n")
    assert progress_of_job.read() == 0.5
    assert progress_of_job.read() == 0.5


def test_a_log_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "CHUNK_BYTES", 2**12)
    lines = (f" iteration {step:8}/  40000 | lm loss: 5.1E+00 |\n" for step in range(20_001))
    (tmp_path / "log.txt").write_text("".join(lines) + "saved checkpoint step=20000\n" * 1000)
    progress_of_job = LogProgress(tmp_path)
    tracemalloc.start()
    try:
        assert progress_of_job.read() == 0.5
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 100_000 < (tmp_path / "log.txt").stat().st_size / 10


def test_shares_without_a_line_of_progress_count_as_not_started(tmp_path: Path) -> None:
    (tmp_path / "log-00000.txt").write_text("t: 5 of 10 documents (50 %), 1 documents/s\n")
    (tmp_path / "log-00001.txt").write_text("t: 10 of 10 documents (100 %), 1 documents/s\n")
    assert LogProgress(tmp_path, num_shares=4).read() == 0.375
