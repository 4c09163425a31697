"""Options out of the text of a --yaml-cfg file: sections laid flat, each key once, `${NAME}` filled
in from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.config import YAML_FLOAT
from trainyard.errors import ConfigError

VARIABLE = re.compile(r"\$\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of the file with its value."""

    value: Any
    line: int
    """Counted from 1."""
    section: str
    """Empty at the root."""

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"line {self.line}" + (f" in {self.section}" if self.section else "")


def read_entries(text: str, environ: Mapping[str, str], where: str) -> dict[str, Entry]:
    """Every key of the file, whatever its section; ConfigError for a key that stands twice."""
    import yaml  # only for whoever writes YAML: 15 ms of start-up

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", YAML_FLOAT, list("-+.0123456789"))
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            _fill_in(root, loader, environ, where, set())
        return _entries(root, loader, where)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not well-formed YAML: {error}") from error
    finally:
        loader.dispose()


def _entries(root: Any, loader: Any, where: str) -> dict[str, Entry]:
    import yaml

    entries: dict[str, Entry] = {}
    if root is None:
        return entries
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{where} must be a table of keys and values")

    def collect(mapping: Any, section: str) -> None:
        loader.flatten_mapping(mapping)  # `<<` takes in another table
        for key_node, value_node in mapping.value:
            key = str(loader.construct_object(key_node))
            line = key_node.start_mark.line + 1
            if isinstance(value_node, yaml.MappingNode):
                if section:
                    raise ConfigError(
                        f"{where}, line {line}: {key} is a section in the section {section}; "
                        "sections stand at the root"
                    )
                collect(value_node, key)
                continue
            entry = Entry(loader.construct_object(value_node, deep=True), line, section)
            before = entries.get(key)
            if before is not None:
                raise ConfigError(
                    f"{where}: {key} stands twice, in {before.place} and in {entry.place}; "
                    "sections are laid flat, so each key has its place once"
                )
            entries[key] = entry

    collect(root, "")
    return entries


def _fill_in(
    node: Any, loader: Any, environ: Mapping[str, str], where: str, seen: set[int]
) -> None:
    """Environment variables into every scalar; a bare one then has the type of what it became."""
    import yaml

    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        if VARIABLE.search(node.value):
            node.value = VARIABLE.sub(
                lambda found: _variable(found, environ, node, where), node.value
            )
            if node.style is None:
                node.tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for part in pair:
                _fill_in(part, loader, environ, where, seen)
    else:
        for part in node.value:
            _fill_in(part, loader, environ, where, seen)


def _variable(found: re.Match[str], environ: Mapping[str, str], node: Any, where: str) -> str:
    value = environ.get(found[1])
    if value is None:
        raise ConfigError(
            f"{where}, line {node.start_mark.line + 1}: the environment variable {found[1]} is not "
            f"set; set it, or write the value in place of {found[0]}"
        )
    return value
