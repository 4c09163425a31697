"""Reads the entries of a --yaml-cfg file.

Sections are flattened, each key occurs once, and `${NAME}` is the value of an environment
variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard import yaml_loader
from trainyard.config_text import KEY
from trainyard.errors import ConfigError
from trainyard.variables import variable

VARIABLE = re.compile(r"\$\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """The value of a key, and where it stands in the file."""

    value: Any
    line: int
    """Counted from 1."""
    section: str
    """Empty at the root."""

    @property
    def place(self) -> str:
        """Its line and section, for messages."""
        return f"line {self.line}" + (f" in {self.section}" if self.section else "")


def read_entries(text: str, environ: Mapping[str, str], where: str) -> dict[str, YamlEntry]:
    """Every key of the file, of any section; ConfigError for a key that occurs twice.

    where: names the file in messages."""
    import yaml  # imported only if a file is YAML: it costs 15 ms of start-up

    loader = None
    try:
        loader = yaml_loader.loader_class()(text)
        root = loader.get_single_node()
        if root is not None:
            _fill_in(root, loader, environ, where, set())
        return _entries(root, loader, where)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = yaml_loader.describe(error)
        raise ConfigError(f"{where} is not well-formed YAML: {what}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _entries(root: Any, loader: Any, where: str) -> dict[str, YamlEntry]:
    import yaml

    entries: dict[str, YamlEntry] = {}
    if root is None:
        return entries
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{where} must be a table of keys and values")

    def collect(mapping: Any, section: str) -> None:
        loader.flatten_mapping(mapping)  # `<<` merges another table
        for key_node, value_node in mapping.value:
            key = str(loader.construct_object(key_node))
            line = key_node.start_mark.line + 1
            if not KEY.fullmatch(key):
                raise ConfigError(
                    f"{where}, line {line}: the key is not a name of letters, digits and '_'"
                )
            if isinstance(value_node, yaml.MappingNode):
                if section:
                    raise ConfigError(
                        f"{where}, line {line}: {key} is a section in the section {section}; "
                        "move it to the root, as sections cannot be nested"
                    )
                collect(value_node, key)
                continue
            entry = YamlEntry(loader.construct_object(value_node, deep=True), line, section)
            before = entries.get(key)
            if before is not None:
                raise ConfigError(
                    f"{where}: {key} occurs twice, in {before.place} and in {entry.place}; "
                    "remove one, because all sections share one set of keys"
                )
            entries[key] = entry

    collect(root, "")
    return entries


def _fill_in(
    node: Any, loader: Any, environ: Mapping[str, str], where: str, seen: set[int]
) -> None:
    """Replace `${NAME}` in every scalar. An unquoted scalar then has the type of its new text."""
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
    line = f"{where}, line {node.start_mark.line + 1}"
    value = variable(found[1], environ, line)
    if value is None:
        raise ConfigError(
            f"{line}: the environment variable {found[1]} is not "
            f"set; set it, or write the value in place of {found[0]}"
        )
    return value
