"""Files without a test that would run are not imported, and those for GPUs are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import left_out

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

FILE = """
import pytest

pytestmark = [pytest.mark.{marker}, pytest.mark.skipif(True, reason="asked for")]
{body}

@pytest.mark.parametrize("a", range(3))
def test_of_three(a): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A machine without a GPU."""
    plugin = Path(left_out.__file__).read_text()
    pytester.makeconftest(plugin + "\n\ndef _has_gpu() -> bool:\n    return False\n")
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    slow\naddopts = -m 'not slow'")
    return pytester


def test_files_for_gpus_are_counted_and_those_left_out_by_a_marker_are_not(
    suite: pytest.Pytester,
) -> None:
    fails = "raise RuntimeError('imported')"
    suite.makepyfile(
        test_gpu=FILE.format(marker="gpu", body=fails),
        test_slow=FILE.format(marker="slow", body=fails),
        test_plain="def test_it(): pass",
    )
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["no CUDA device, so files marked gpu are left out: 1 *"])


def test_cases_for_gpus_are_skipped_one_by_one_when_asked_for(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_gpu=FILE.format(marker="gpu", body=""))
    for asked in (["-m", "gpu"], ["test_gpu.py"]):
        result = suite.runpytest_subprocess(*asked)
        result.assert_outcomes(skipped=3)
        result.stdout.no_fnmatch_line("no CUDA device*")
