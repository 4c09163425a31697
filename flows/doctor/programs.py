"""Programs that are asked whether all is well."""

from __future__ import annotations

from collections.abc import Sequence

from flows.backends.program import run_program

SECONDS = 10.0
SMOKE_SECONDS = 40.0


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit status of a program that gets so long, and what it printed, or of one that failed its
    last words."""
    said = run_program(command, seconds)
    if said.status == 0:
        return 0, said.out.strip()
    return said.status, said.words or f"{command[0]}: status {said.status}"
