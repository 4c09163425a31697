"""The version of the code that a stage uses: a digest of every source that its imports reach.

Follows static imports of our own packages, also those inside functions; nothing is imported."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from trainyard.artifacts.digest import digest_bytes, digest_files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainyard", "stages")

IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+((?:trainyard|stages)[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    rb"|import[ \t]+((?:trainyard|stages)[\w.]*))",
    re.MULTILINE,
)


def _source(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(source: bytes) -> set[str]:
    found: set[str] = set()
    for origin, names, plain in IMPORT.findall(source):
        module = (origin or plain).decode()
        found.add(module)
        for name in re.findall(rb"\w+", names):
            found.add(f"{module}.{name.decode()}")  # a submodule, or else no file and passed over
    return found


def sources(*modules: str) -> dict[str, Path]:
    """Every source file of ours that the modules reach, by its path below the root."""
    pending, seen, files = list(modules), set(modules), {}
    while pending:
        path = _source(pending.pop())
        if path is None:
            continue
        files[path.relative_to(ROOT).as_posix()] = path
        for name in _imports(path.read_bytes()) - seen:
            seen.add(name)
            pending.append(name)
    return files


@lru_cache(maxsize=32)
def code_digest(*modules: str) -> str:
    """One digest of the sources that the modules reach."""
    contents = {name: path.read_bytes() for name, path in sources(*modules).items()}
    return digest_files((name, len(data), digest_bytes(data)) for name, data in contents.items())
