"""Compiled functions are loaded without numba, and made anew if what they contain has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainyard.collection import line_kernels
from trainyard.machine_code import zeros_below

INNER = """
from trainyard.machine_code import compiled_inside

BASE = {base}


@compiled_inside
def inner(number):
    return number + BASE
"""
OUTER = """
import sys

import numpy as np
from inner import inner
from trainyard.machine_code import machine_code, zeros_below


@machine_code("i8(i8, u8[::1], f8[:, ::1])")
def outer(number, bits, sums):
    for i in range(len(bits)):
        sums[i, 1] = zeros_below(bits[i])
    return inner(number)


bits, sums = np.array([0, 1, 1 << 63], np.uint64), np.zeros((3, 2))
assert outer(1, bits, sums) == inner(1)
assert sums.tolist() == [[0, 64], [0, 0], [0, 63]]
unasked = {"awkward", "numba", "torch"} & sys.modules.keys()
print(inner(1), *sorted(unasked))
"""


def run_outer(folder: Path, base: int) -> list[str]:
    """What a process prints: the result, and the packages that it loaded."""
    (folder / "inner.py").write_text(INNER.format(base=base))
    (folder / "outer.py").write_text(OUTER)
    places = {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **places, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(folder / "outer.py")]
    return subprocess.check_output(command, text=True, env=environment).split()


@pytest.mark.slow
def test_code_is_kept_until_what_it_contains_changes(tmp_path: Path) -> None:
    said = [run_outer(tmp_path, base) for base in (1, 1, 2, 2)]
    assert said == [["2", "numba"], ["2"], ["3", "numba"], ["3"]]


@pytest.mark.slow
def test_code_that_was_cut_short_or_changed_is_made_anew(tmp_path: Path) -> None:
    run_outer(tmp_path, 1)
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"[]\n"):
        kept.write_bytes(damaged)
        assert run_outer(tmp_path, 1) == ["2", "numba"]
    assert kept.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [0, 1, 5])
def test_arrays_of_other_kinds_are_refused(damaged: int) -> None:
    numbers = np.zeros((1, 0), np.int64)
    given = [np.frombuffer(b"{}", np.uint8), np.array([0, 4]), np.frombuffer(b"}\n", np.uint8)]
    given += [np.array([0, 2]), numbers, np.zeros(0, np.int64), np.zeros(9, np.uint8)]
    assert line_kernels.add_to_lines(*given) == 4
    given[damaged] = given[damaged].astype(np.float32)
    with pytest.raises(TypeError, match="float32 of 1 axes"):
        line_kernels.add_to_lines(*given)


def test_python_counts_zeros_as_a_processor_does() -> None:
    numbers = (0, 1, 6, 1 << 63)
    assert [zeros_below(np.uint64(number)) for number in numbers] == [64, 0, 1, 63]
