"""Lines of JSON with keys added at their ends, without a Python object for each line.

Machine code. Knows nothing of what the lines contain."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainyard.machine_code import compiled_inside, machine_code


@compiled_inside
def _decimal(out: Any, at: int, number: int, width: int) -> int:
    """Write a number of at least so many digits; where it ends."""
    left, digits = number // 10, 1
    while left > 0:
        left, digits = left // 10, digits + 1
    end = at + max(digits, width)
    for place in range(end - 1, at - 1, -1):
        out[place] = 48 + number % 10
        number //= 10
    return end


@machine_code("i8(u1[::1], i8[::1], u1[::1], i8[::1], i8[:, ::1], i8[::1], u1[::1])")
def add_to_lines(
    data: Any, begins: Any, texts: Any, cuts: Any, numbers: Any, widths: Any, out: Any
) -> np.int64:
    """Write to `out` each line with an end in place of its last two bytes, a brace and a line feed;
    how many bytes that are. begins: of the lines, and of the one behind. An end is of texts with
    numbers between them. texts: end to end. cuts: where each begins, and where the last one ends.
    numbers: (lines, texts - 1). widths: digits that those between two texts have at least."""
    at = 0
    for line in range(len(begins) - 1):
        begin, size = begins[line], begins[line + 1] - 2 - begins[line]
        # Unsigned: numba looks whether a signed index is negative.
        source, target = np.uint64(begin), np.uint64(at)
        for i in range(np.uint64(max(size, 0))):
            out[target + i] = data[source + i]
        at += size
        for text in range(len(cuts) - 1):
            for i in range(cuts[text], cuts[text + 1]):
                out[at] = texts[i]
                at += 1
            if text < len(widths):
                at = _decimal(out, at, numbers[line, text], widths[text])
    return np.int64(at)
