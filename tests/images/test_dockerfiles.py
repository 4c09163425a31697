"""Dockerfiles, where they can be read but not all of them built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("images", "deploy")
    for path in (ROOT / folder).rglob("*Dockerfile")
)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_warns_of_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_dockerfiles() -> None:
    assert {"images/cpu.Dockerfile", "images/cuda.Dockerfile"} < set(DOCKERFILES)
