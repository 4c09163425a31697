"""Documents of options as text: TOML, YAML or JSON, of bounded size. Standard library, except for
YAML."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from trainyard import yaml_loader
from trainyard.errors import ConfigError

YAML = (".yaml", ".yml")
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
MAX_VALUES = 1_000_000
"""Of a document, with what its aliases repeat."""
MAX_DEPTH = 50


def parse_document(text: str, suffix: str, where: str) -> dict[str, Any]:
    """A TOML, YAML or JSON document, by the ending of its name."""
    try:
        if suffix == ".toml":
            document: Any = tomllib.loads(text)
        elif suffix in YAML:
            document = _parse_yaml(text)
        elif suffix == ".json":
            document = json.loads(text)
        else:
            raise ConfigError(
                f"{where}: a config ends in .toml, .yaml, .yml or .json, not {suffix!r}"
            )
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply") from None
    except Exception as error:  # each parser raises its own kinds of errors
        what = yaml_loader.describe(error) if suffix in YAML else str(error)
        raise ConfigError(f"{where} is not well-formed {suffix[1:].upper()}: {what}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must be a table of keys and values")
    _check_size(document, where)
    for number, key in enumerate(document, 1):
        # Not shown: a file that is no config may have a secret there.
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise ConfigError(f"{where}: key {number} is not a name of letters, digits and '_'")
    return document


def _parse_yaml(text: str) -> Any:
    import yaml  # 15 ms, needed for YAML only

    return yaml.load(text, yaml_loader.loader_class())


def _check_size(document: dict[str, Any], where: str) -> None:
    """Refuse a document that a walk over its values would not finish."""
    left, waiting = MAX_VALUES, [iter(document.values())]
    while waiting:
        for value in waiting[-1]:
            left -= 1
            if left < 0 or len(waiting) > MAX_DEPTH:
                raise ConfigError(f"{where} unfolds into too many values, or is nested too deeply")
            if isinstance(value, dict | list | tuple | set):
                inner = value.values() if isinstance(value, dict) else value
                waiting.append(iter(inner))
                break
        else:
            waiting.pop()
