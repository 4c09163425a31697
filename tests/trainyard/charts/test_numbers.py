"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from trainyard.charts import numbers


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (numbers.scaled(3_412_224), "3.41 M"),
        (numbers.scaled(12_345), "12.3 k"),
        (numbers.scaled(1234), "1 234"),
        (numbers.size(820), "820 B"),
        (numbers.size(43_100_000), "43.1 MB"),
        (numbers.duration(0.04), "0.0 s"),
        (numbers.duration(59.9), "1 min"),
        (numbers.duration(127), "2 min 7 s"),
        (numbers.duration(90_061), "1 d 1 h"),
        (numbers.rate(6e-4), "6e\u22124"),
        (numbers.rate(0.0), "0"),
        (numbers.shown(math.nan), "not finite"),
    ],
)
def test_numbers_are_formatted_for_people(shown: str, text: str) -> None:
    assert shown.replace(numbers.NARROW, " ") == text
