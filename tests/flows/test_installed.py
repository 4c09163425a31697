"""The flows as a package without the rest of the sources, as `pip install` leaves them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.processes import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "command", [("flows.prepare_corpus", "x.toml", "--profile"), ("flows.register", "--yard")]
)
def test_a_missing_yard_names_the_folder(tmp_path: Path, command: tuple[str, ...]) -> None:
    shutil.copytree(ROOT / "flows", tmp_path / "flows")
    result = subprocess.run(
        [sys.executable, "-m", *command, "compose"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert f"profiles are read from {tmp_path}/deploy/yards, which does not exist" in result.stderr
    assert "Traceback" not in result.stderr
