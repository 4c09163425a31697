"""PyYAML's safe loader for documents of unknown origin: bounded in time, with quiet errors.

A document may come from anywhere and an error may be read by anyone, so an error never quotes the
text. Also reads numbers such as 1e-4, which YAML 1.1, and so PyYAML, reads as text."""

from __future__ import annotations

import functools
import re
from typing import Any

FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+")

MAX_BARE_CHARS = 400
"""A longer scalar without quotes is text: PyYAML takes quadratic time to make a number of it."""
MAX_ALIASES = 1000
MAX_MERGED = 10_000
"""Entries of a table with those that `<<` merges into it, which double with each level."""

HARMLESS = re.compile(r"[^'\"]*('<[a-z ]+>'|'.')?", re.DOTALL)
"""The beginning of PyYAML's message, up to where it quotes the document."""


@functools.cache
def loader_class() -> Any:
    """The loader; PyYAML is imported by the first call, which takes 15 ms."""
    import yaml

    class Loader(yaml.SafeLoader):
        num_aliases = 0

        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            if kind is yaml.ScalarNode and implicit[0] and len(value) > MAX_BARE_CHARS:
                return self.DEFAULT_SCALAR_TAG
            return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                self.num_aliases += 1
                if self.num_aliases > MAX_ALIASES:
                    self._refuse(f"more than {MAX_ALIASES} aliases", parent)
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MAX_MERGED:
                self._refuse(f"a table of more than {MAX_MERGED} merged entries", node)

        def _refuse(self, problem: str, at: Any) -> None:
            raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
    return Loader


def describe(error: Exception) -> str:
    """An error of the loader without the text that it stumbled over."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if not isinstance(problem, str):
        return "it has characters or a nesting that YAML does not allow"
    beginning = HARMLESS.match(problem)
    assert beginning is not None
    where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
    return beginning[0].strip() + where
