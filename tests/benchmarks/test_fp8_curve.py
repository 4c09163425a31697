"""What the comparison of loss curves says."""

from __future__ import annotations

import pytest

from benchmarks.fp8_curve import relative_differences, row, smoothed


def test_differences_of_both_signs_cancel_in_means_only() -> None:
    reference = [2.0] * 40
    losses = [2.02, 1.98] * 20
    assert relative_differences(losses, reference) == pytest.approx([0.01] * 40)
    assert smoothed(losses) == pytest.approx([2.0] * 21)
    assert smoothed([1.0, 2.0, 6.0, 7.0], window=3) == pytest.approx([3.0, 5.0])
    assert row("fp8", losses, reference) == "| fp8 | 2.0200, 1.9800 | 1.00% | 0.00% | yes |"
    assert row("fp8", [2.02] * 40, reference).endswith("| 1.00% | 1.00% | no |")
