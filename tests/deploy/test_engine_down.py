"""Ending the engine of tests removes what it made, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/dev/engine-down.sh"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("purge", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_what_is_removed(tmp_path: Path, purge: bool, first: bool) -> None:
    folder, data, other = (tmp_path / name for name in ("engine", "data", "other"))
    for made in (folder / "exec" / "netns", data, other):
        made.mkdir(parents=True)
    options = ["--purge"] if purge else []
    given = [*options, str(folder)] if first else [str(folder), *options]
    environment = {**os.environ, "YARD_ENGINE_DATA": str(data)}
    done = subprocess.run([SCRIPT, *given], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
    assert data.exists() is not purge
    assert other.exists()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_bridge_of_another_engine_stays(tmp_path: Path, is_ours: bool) -> None:
    folder, asked = tmp_path / "engine", tmp_path / "asked"
    folder.mkdir()
    if is_ours:
        (folder / "docker0").touch()  # as engine-up.sh does where there was none
    program = tmp_path / "ip"
    program.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([SCRIPT, folder], env=environment, check=True)
    assert (asked.read_text() if asked.exists() else "") == "link delete docker0\n" * is_ours


def test_an_option_that_is_none_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "--force"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown option --force" in done.stderr
