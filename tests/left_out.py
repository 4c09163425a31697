"""Files that are not imported, as no test of them would run.

Each worker of xdist imports every file that it collects. A file whose `pytestmark` has a marker
that -m leaves out need not be imported. Nor need one marked `gpu` on a machine without a CUDA
device: its hundreds of cases would all be skipped. A line at the end counts these files; `-m gpu`,
or naming a file, collects and skips each case."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

GPU_FILES = pytest.StashKey[list[str]]()
"""Files that were left out because this machine has no CUDA device."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file is left out; None lets other rules decide."""
    if collection_path.suffix != ".py" or _is_named(collection_path, config):
        return None
    expression = config.option.markexpr
    marks = _marks(collection_path)
    if marks & _excluded(expression):
        return True
    if "gpu" in marks and not re.search(r"\bgpu\b", expression) and not _has_gpu():
        config.stash.setdefault(GPU_FILES, []).append(str(collection_path))
        return True
    return None


def _is_named(path: Path, config: pytest.Config) -> bool:
    """A file that was asked for by its name is collected, and what is left out of it counted."""
    folder = config.invocation_params.dir
    return any((folder / given.split("::")[0]).resolve() == path for given in config.args)


def _marks(path: Path) -> set[str]:
    """The markers in the `pytestmark` of a file."""
    found = re.search(r"^pytestmark = (\[[^\]]*\]|.*)", path.read_text(), re.MULTILINE)
    return set(re.findall(r"\bpytest\.mark\.(\w+)", found[1])) if found else set()


def _excluded(expression: str) -> set[str]:
    """The markers that no test has which `expression` chooses, where it is one of plain `and`s."""
    terms = expression.split(" and ")
    if not all(re.fullmatch(r"(not )?\w+", term.strip()) for term in terms):
        return set()
    return {term.split()[1] for term in terms if term.strip().startswith("not ")}


@functools.cache
def _has_gpu() -> bool:
    import torch  # seconds, and most runs of a single file need no answer

    return torch.cuda.is_available()


# --- what is said of it ------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist hands its list to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_files"] = session.config.stash.get(GPU_FILES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers collect the same, so any list is the list."""
    node.config.stash[GPU_FILES] = getattr(node, "workeroutput", {}).get("gpu_files", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The number of files, above pytest's last line."""
    files = config.stash.get(GPU_FILES, [])
    if files:
        terminalreporter.write_line(
            f"no CUDA device, so files marked gpu are left out: {len(files)} (-m gpu skips by case)"
        )
