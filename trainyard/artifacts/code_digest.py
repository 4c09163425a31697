"""The version of a stage's code: a digest of every source file that its imports reach.

Follows static imports of trainyard's packages, also those inside functions; imports nothing.
Templates and style sheets count with the modules in their folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path

from trainyard.artifacts.digest import digest_bytes, digest_files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trainyard", "stages")
DATA = (".css", ".j2")
"""Files that a module may read from its own folder."""

IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+((?:trainyard|stages)[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    rb"|import[ \t]+((?:trainyard|stages)[\w.]*))",
    re.MULTILINE,
)


def _source(module: str, listed: Callable[[str], frozenset[str]]) -> Path | None:
    folder, _, name = module.rpartition(".")
    names = listed(folder)  # most names looked up here are not modules
    if f"{name}.py" in names:
        return ROOT.joinpath(*folder.split("."), f"{name}.py")
    if name in names and "__init__.py" in listed(module):
        return ROOT.joinpath(*module.split("."), "__init__.py")
    return None


def _listed(package: str) -> frozenset[str]:
    """Names in the folder of a package; empty without such a folder."""
    try:
        return frozenset(os.listdir(ROOT.joinpath(*package.split("."))))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()


def _imports(source: bytes) -> set[str]:
    found: set[str] = set()
    for origin, names, plain in IMPORT.findall(source):
        module = (origin or plain).decode()
        found.add(module)
        for name in re.findall(rb"\w+", names):
            found.add(f"{module}.{name.decode()}")  # a submodule; skipped if it has no file
    return found


def sources(*modules: str) -> dict[str, Path]:
    """Every source file of trainyard that the modules reach, by its path below the root."""
    pending, seen = list(modules), set(modules)
    files: dict[str, Path] = {}
    listed = cache(_listed)
    while pending:
        path = _source(pending.pop(), listed)
        if path is None:
            continue
        folder = path.relative_to(ROOT).parent
        data = [name for name in listed(".".join(folder.parts)) if name.endswith(DATA)]
        files |= {(folder / name).as_posix(): ROOT / folder / name for name in (path.name, *data)}
        for name in _imports(path.read_bytes()) - seen:
            seen.add(name)
            pending.append(name)
    return files


@lru_cache(maxsize=32)
def _file_digests(*modules: str) -> dict[str, tuple[int, str]]:
    """Size and digest of each source that the modules reach."""
    contents = {name: path.read_bytes() for name, path in sources(*modules).items()}
    return {name: (len(data), digest_bytes(data)) for name, data in contents.items()}


def code_digest(*modules: str) -> str:
    """One digest of the sources that the modules reach."""
    return digest_files((name, *found) for name, found in _file_digests(*modules).items())


SHORT = 8
"""Digits of a digest that tell two versions of a file apart."""


def code_files(*modules: str) -> dict[str, str]:
    """The beginning of the digest of each source, by its path: names the files that changed."""
    found = _file_digests(*modules)
    return {name: found[name][1][:SHORT] for name in sorted(found)}


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths whose content differs, or that only one side has. `code_files` of both sides."""
    return sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
