"""Runs doctor on a yard that is set up for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.yard.yard import ROOT

WRONG_SETTING, MAY_PASS = 2, 3

PROCESSES = 'block = "process"\n'


@dataclass(frozen=True, slots=True)
class Visit:
    """The findings of doctor."""

    status: int
    findings: dict[str, dict[str, Any]]

    def ill(self) -> set[str]:
        return {name for name, found in self.findings.items() if found["state"] == "fail"}

    def message(self, name: str) -> str:
        found = self.findings[name]
        assert found["see"].startswith("docs/troubleshooting.md#")
        return f"{found['told']} -> {found['todo']}"


@dataclass(frozen=True, slots=True)
class Practice:
    """A folder for a yard to be looked at."""

    folder: Path

    def visit(
        self,
        profile: str = PROCESSES,
        *only: str,
        root: str = "",
        environment: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
        within: Sequence[str] = (),
        program: Sequence[str] = ("-m", "flows.doctor"),
    ) -> Visit:
        """Run doctor; `within`: a shell command that runs "$@" at its end."""
        path = self.folder / "profile.toml"
        path.write_text(profile)
        command = [sys.executable, *program, "--yard", str(path), "--json", *more]
        command += ["--root", root or str(self.folder / "yard")]
        command += [word for name in only for word in ("--only", name)]
        taken_out = ("PREFECT_", "YARD")
        given = {k: v for k, v in os.environ.items() if not k.startswith(taken_out)}
        done = subprocess.run(
            [*within, *(["sh"] if within else []), *command],
            cwd=ROOT,
            env={**given, "OMP_NUM_THREADS": "1", "PREFECT_HOME": str(self.folder / "prefect")}
            | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=250,
        )
        return seen(done.returncode, done.stdout, done.stderr)


def seen(status: int, out: str, err: str) -> Visit:
    """What a visit with --json printed."""
    assert out.startswith("{"), out + err
    found = json.loads(out)
    assert found["exit_status"] == status
    return Visit(status, {finding["name"]: finding for finding in found["checks"]})
