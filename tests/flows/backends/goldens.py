"""Texts that rendering must give again, letter by letter.

After a wanted change: `TRAINYARD_WRITE_GOLDEN=1 python -m pytest tests/flows/backends`, and read
the difference."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare a text with the file of that name."""
    path = FOLDER / name
    if os.environ.get("TRAINYARD_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
