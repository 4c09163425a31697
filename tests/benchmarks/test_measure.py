"""The memory of a tree of processes: everything once."""

from __future__ import annotations

import sys

import pytest

from benchmarks import measure

SIZE = 64 << 20
HOLD = f"import os, subprocess, sys, time; held = bytearray(b'1') * {SIZE}\n"
START_MANY = "for _ in range(80): subprocess.run(['true'])\n"
FORK = """
for _ in range(3):
    if os.fork() == 0: time.sleep(0.3); os._exit(0)
for _ in range(3): os.wait()
"""
SPAWN = f"""
child = "import time; held = bytearray(b'1') * {SIZE}; time.sleep(0.3)"
subprocess.run([sys.executable, "-c", child])
"""


@pytest.mark.slow
@pytest.mark.skipif(measure.KCMP is None, reason="no kcmp for this architecture")
@pytest.mark.parametrize(
    ("script", "times"),
    [(START_MANY, 1), (FORK, 1), (SPAWN, 2)],
    ids=["programs", "forks", "another that holds as much"],
)
def test_shared_pages_count_once(monkeypatch: pytest.MonkeyPatch, script: str, times: int) -> None:
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.001)
    ours = bytearray(b"1") * (3 * SIZE)  # is none of theirs
    run = measure.run_once([sys.executable, "-c", HOLD + script])
    assert times * SIZE < run.peak_bytes < (times + 0.6) * SIZE
    assert ours
