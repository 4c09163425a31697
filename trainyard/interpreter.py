"""Says how to start a program of trainyard when the Python that runs it is not the installed one.

Runs on any Python 3, so that an old one gets an answer as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

OLDEST = (3, 11)
NEEDED = "blake3"
"""A module that everything needs, and that no Python brings."""


def check_program() -> None:
    """End a program started with `python -m` if its Python is too old, or not the installed one."""
    if sys.argv[0] != "-m":  # a library, or a test
        return
    if sys.version_info < OLDEST:
        problem = "is Python {}.{}, and trainyard needs 3.11 or newer".format(*sys.version_info)
    elif importlib.util.find_spec(NEEDED) is None:
        problem = f"has no module {NEEDED}, which trainyard needs"
    else:
        return
    words = getattr(sys, "orig_argv", ["-m", "MODULE"])
    module = words[words.index("-m") + 1]
    print(f"error: {sys.executable} {problem}: {_how_to_start(module)}", file=sys.stderr)
    raise SystemExit(2)


def _how_to_start(module: str) -> str:
    """The command that works."""
    found = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
    first = "run " if found.exists() else "run `make install` once, then "
    return f"{first}`{found} -m {module} ...`, or `. {found.parent}/activate` first"
