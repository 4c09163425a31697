"""Compiled functions take numba alone."""

from __future__ import annotations

import subprocess
import sys

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
