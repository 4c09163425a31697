"""Programs that get so long, and no longer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from flows.blocks.slurm_client import client_environment

SECONDS = 10.0
SMOKE_SECONDS = 40.0


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit status and last words of a program that gets so long and no longer."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=client_environment(os.environ.items()),
            timeout=seconds,
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed here"
    except PermissionError:
        return 126, f"{command[0]} may not be run"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {seconds:.0f} s"
    if done.returncode == 0:
        return 0, done.stdout.strip()
    words = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode, words[-1] if words else f"{command[0]}: status {done.returncode}"
