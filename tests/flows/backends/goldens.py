"""Texts that rendering must give again, letter by letter.

To update them: `TRAINYARD_WRITE_GOLDEN=1 python -m pytest tests/flows/backends`; read the diff."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare a text with the file of that name."""
    path = FOLDER / name
    if os.environ.get("TRAINYARD_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def check_golden_script(name: str, script: str) -> None:
    """Compare a script of bash with its file; bash understands it, shellcheck has no warning."""
    check_golden(name, script)
    for command in (["bash", "-n"], ["shellcheck", "--severity=warning", "-"]):
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed; the golden text was compared")
        checked = subprocess.run(command, input=script, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
