"""Failures that end a flow at once, failures that are retried, and the exit statuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.yard.yard import COLLECTED, Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

RETRIES = """
import asyncio, sys
from prefect import flow
from flows.runner import retry
from flows.recipes.stage_job import stage_job
from flows.backends.outcome import StageError
from flows.runner.stage_task import StageEnvironment, run_stage_task

folder, python = sys.argv[1:]
model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
job = stage_job("plan", {**model, "vocab_size": 300, "output_dir": folder + "/plan"}, "test")
retry.PAUSES_SECONDS = (0.0, 0.0, 3600.0)

@flow
async def once():
    await run_stage_task(job, StageEnvironment(run_folder=folder + "/runs", python=python))

try:
    asyncio.run(once())
except StageError as error:
    raise SystemExit(error.exit_status)
"""

FAILS_TWICE = """#!/bin/sh
echo attempt >> {folder}/attempts
[ "$(wc -l < {folder}/attempts)" -gt 2 ] || exit {status}
exec {python} "$@"
"""


@pytest.mark.parametrize(("status", "attempts", "ends"), [(3, 3, 0), (1, 1, 1), (70, 1, 70)])
def test_only_status_3_is_tried_again(
    tmp_path: Path, prefect_api: dict[str, str], status: int, attempts: int, ends: int
) -> None:
    python, script = tmp_path / "python", tmp_path / "retries.py"
    python.write_text(FAILS_TWICE.format(folder=tmp_path, status=status, python=sys.executable))
    python.chmod(0o755)
    script.write_text(RETRIES)
    yard = Yard(tmp_path, {**prefect_api, "PYTHONPATH": "."})
    ended = yard.run(str(script), str(tmp_path), str(python))
    assert ended.status == ends, ended.err
    assert (tmp_path / "attempts").read_text().split() == ["attempt"] * attempts


PUSHED_OUT = """#!/bin/sh
# Publishes a step, and loses its node; on the last day it comes to its end.
day=$(ls -d {folder}/plan/iter_* 2>/dev/null | wc -l)
[ "$day" -lt {days} ] || exec {python} "$@"
step={folder}/plan/iter_$(printf %07d $((100 * day + 100)))
mkdir -p "$step" && echo '{{}}' > "$step/manifest.json"
exit 3
"""


def test_daily_preemption_is_always_retried(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    """The third pause in a row would last an hour."""
    python, script = tmp_path / "python", tmp_path / "retries.py"
    python.write_text(PUSHED_OUT.format(folder=tmp_path, days=30, python=sys.executable))
    python.chmod(0o755)
    script.write_text(RETRIES)
    yard = Yard(tmp_path, {**prefect_api, "PYTHONPATH": "."})
    ended = yard.run(str(script), str(tmp_path), str(python))
    assert ended.status == 0, ended.err
    assert len(list((tmp_path / "plan").glob("iter_*"))) == 30


def test_a_wrong_recipe_is_refused_before_any_output(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    ended = yard.pretrain(yard.recipe(COLLECTED.replace("hidden_size", "hiden_size")))
    assert ended.status == 2
    assert "did you mean 'hidden_size'" in ended.err
    assert ended.seconds < 3
    assert not (tmp_path / "yard").exists()


def test_an_absent_server_is_an_infrastructure_error(tmp_path: Path) -> None:
    yard = Yard(tmp_path, {"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    ended = yard.pretrain(yard.recipe(COLLECTED))
    assert ended.status == 3, ended.err
    assert "http://127.0.0.1:9/api" in ended.err
    assert "Traceback" not in ended.err


def test_one_stage_as_a_flow(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    yard = Yard(tmp_path, prefect_api)
    document = tmp_path / "plan.toml"
    model = "num_layers = 1\nhidden_size = 32\nnum_attention_heads = 2\nseq_length = 8\n"
    document.write_text(f'{model}vocab_size = 300\noutput_dir = "{tmp_path}/plan"\n')
    ended = yard.run("-m", "flows.run_stage", "plan", "--config", str(document))
    assert ended.status == 0, ended.err
    assert ended.out == f"{tmp_path}/plan/manifest.json\n"
    assert yard.run("-m", "flows.run_stage", "pla", "--config", str(document)).status == 2
