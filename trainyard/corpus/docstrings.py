"""Extracts English text that every machine with Python has: help topics and docstrings.

Sources are parsed, never imported, so nothing runs, and equal files give equal text on every
machine. Knows nothing of where Python or its packages are installed."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

MIN_LETTERS = 64
"""Shorter docstrings are left out: most only repeat the name of the function."""

END_OF_TEXT = "<|endoftext|>"
"""Text with this string is left out: tokenizers would end a document there."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages"})
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)


def module_files(folder: Path) -> Iterator[str]:
    """Relative names of the Python sources below a folder, sorted, without tests."""
    names = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if not is_skipped(parts) and "dist-packages" not in parts:
            names.append("/".join(parts))
    yield from sorted(names)


def is_skipped(parts: tuple[str, ...]) -> bool:
    """Whether a file lies below a folder of tests, or of files that are no sources."""
    return not SKIPPED_FOLDERS.isdisjoint(parts)


def module_name(relative: str) -> str:
    """The module of a file: `json/decoder.py` is `json.decoder`."""
    return relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_well_documented(source: bytes) -> bool:
    """Whether at least a quarter of a source is between triple quotes; a quick estimate."""
    return 4 * sum(map(len, QUOTED.findall(source))) >= len(source)


def docstrings(source: bytes) -> Iterator[tuple[str, str]]:
    """(qualified name, text) of each docstring in a module; the module's own has the name "".

    A source that this Python cannot parse has none."""
    tree = _parse(source)
    if tree is not None:
        yield from _of_scope(tree, "")


def topics(source: bytes) -> Iterator[tuple[str, str]]:
    """(name, text) of each help topic in the source of `pydoc_data.topics`, sorted."""
    tree = _parse(source)
    for node in tree.body if tree is not None else ():
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            yield from sorted(ast.literal_eval(value).items())


def is_wanted(text: str) -> bool:
    """Whether a text is long enough, and can be encoded and tokenized."""
    return len(text) >= MIN_LETTERS and END_OF_TEXT not in text and not _has_surrogates(text)


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _parse(source: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as invalid escapes in other projects' sources
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _of_scope(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    body: list[ast.stmt] = getattr(node, "body", [])
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        text = body[0].value.value
        if isinstance(text, str):
            yield name, inspect.cleandoc(text).strip()
    yield from _of_statements(body, name)


def _of_statements(body: list[ast.stmt], scope: str) -> Iterator[tuple[str, str]]:
    # Only statements: ast.walk would spend most of its time in expressions.
    for statement in body:
        if isinstance(statement, DEFINITIONS):
            yield from _of_scope(statement, f"{scope}.{statement.name}".lstrip("."))
            continue
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(statement, field, None)
            if isinstance(inner, list):
                yield from _of_statements(inner, scope)
