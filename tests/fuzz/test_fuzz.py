"""Every fuzz target runs for some seconds without a find.

TRAINYARD_FUZZ_SECONDS says how many each (20 by default), TRAINYARD_FUZZ_SEED where chance begins
(1, so that a change is not blamed for what another run did not come upon; 0 begins anew)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = sorted(Path(__file__).parent.glob("fuzz_*.py"))
SECONDS = int(os.environ.get("TRAINYARD_FUZZ_SECONDS", "20"))
SEED = int(os.environ.get("TRAINYARD_FUZZ_SEED", "1"))


@pytest.mark.fuzz
@pytest.mark.timeout(SECONDS * 3 + 120)
@pytest.mark.parametrize("target", TARGETS, ids=lambda path: path.stem)
def test_nothing_unexpected_comes_out(target: Path, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    command = [sys.executable, str(target), f"-max_total_time={SECONDS}", f"-seed={SEED}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    finds = sorted(path.name for path in tmp_path.iterdir())
    assert done.returncode == 0, f"{finds}\n{done.stdout}\n{done.stderr[-2000:]}"
    assert not finds
