"""Compiled functions take numba alone, and of numba what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from trainyard.machine_code import machine_code

assert machine_code("int64(int64)")(lambda number: number + 1)(1) == 2
print(*[name for name in ("awkward", "torch") if name in sys.modules])
"""


@pytest.mark.slow
def test_extensions_of_other_packages_stay_unloaded() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


ALLOCATES = """
import numpy as np
from numba.core.runtime import rtsys
from trainyard.machine_code import machine_code


@machine_code("int64(int64)")
def summed(count):
    numbers = np.arange(count)
    return numbers.sum()


print(summed(5), rtsys._library is None)
"""


@pytest.mark.slow
def test_reference_counts_are_compiled_for_what_is_not_cached(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALLOCATES)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": "."}
    command = [sys.executable, str(script)]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(2)
    ]
    assert [run.split() for run in runs] == [["10", "False"], ["10", "True"]]
