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


INNER = """
from trainyard.machine_code import compiled_inside

BASE = {base}


@compiled_inside
def inner(number):
    return number + BASE
"""
OUTER = """
from inner import inner
from trainyard.machine_code import machine_code


@machine_code("int64(int64)")
def outer(number):
    return inner(number)


print(outer(1), sum(outer.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_code_in_the_cache_is_not_used_when_what_it_contains_has_changed(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(OUTER)
    places = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **places, "PYTHONPATH": str(Path.cwd())}
    said = []
    for base in (1, 1, 2):
        (tmp_path / "inner.py").write_text(INNER.format(base=base))
        command = [sys.executable, str(tmp_path / "outer.py")]
        said += subprocess.check_output(command, text=True, env=environment).splitlines()
    assert said == ["2 0", "2 1", "3 0"]


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
