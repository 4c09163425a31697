"""What an image runs for the arguments of `docker run`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "images" / "stage-entrypoint"


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ("", "-m stages.retro_embed"),
        ("--help", "-m stages.retro_embed --help"),
        ("pretrain_gpt.py --lr 1", "-m stages.megatron pretrain_gpt.py --lr 1"),
        ("tools/merge_datasets.py", "-m stages.megatron tools/merge_datasets.py"),
        ("python -c pass", "-c pass"),
    ],
)
def test_arguments_go_to_the_stage_the_door_or_a_command(
    tmp_path: Path, given: str, runs: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAINYARD_STAGE": "retro-embed"}
    done = subprocess.run(
        ["sh", str(ENTRYPOINT), *given.split()],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == runs
