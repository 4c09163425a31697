"""The public names: those of docs/library.md, light to import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard import api

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = [
    (DOCS / "examples" / f"{name}.py").read_text() for name in ("training_loop", "bytes_model")
]
PAGE = (DOCS / "library.md").read_text() + "".join(PROGRAMS)


def imports(program: str) -> list[tuple[str, str]]:
    """(module, name) of every `from MODULE import NAME`."""
    statements = ast.walk(ast.parse(program))
    froms = [node for node in statements if isinstance(node, ast.ImportFrom)]
    return [(node.module or "", alias.name) for node in froms for alias in node.names]


def test_the_examples_import_public_names_alone() -> None:
    ours = [found for text in PROGRAMS for found in imports(text) if "trainyard" in found[0]]
    assert len(ours) > 30
    assert {module for module, _ in ours} == {"trainyard.api"}
    assert {name for _, name in ours} <= set(api.MODULES)


def test_page_and_examples_show_every_public_name() -> None:
    assert [name for name in api.MODULES if not re.search(rf"\b{name}\b", PAGE)] == []


def test_every_public_name_exists_in_its_module() -> None:
    for name in dir(api):
        assert getattr(api, name) is not None, name
    with pytest.raises(AttributeError, match=r"no 'load_gpt'; it has ALONE, "):
        _ = api.load_gpt


@pytest.mark.slow
def test_importing_the_library_imports_nothing_heavy() -> None:
    program = (
        "import sys, trainyard, trainyard.api, trainyard.api as api; api.GPTConfig\n"
        "print(sorted({'torch', 'numpy', 'fsspec', 'tyro', 'prefect'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
