"""Reads a yard profile: a TOML file, deploy/yards/NAME.toml or any other by its path."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from flows.backends.spec import Mount, Resources
from flows.stage_configs import CONFIGS
from flows.yard.profile import BACKEND_OPTIONS, Automations, FlowSchedule, Pool, Profile, Watch
from trainyard.artifacts.documents import read_text
from trainyard.artifacts.urls import basename, show_url
from trainyard.config import check_known, convert, from_table, suggest
from trainyard.config_text import parse_document
from trainyard.errors import ConfigError, TrainyardError
from trainyard.variables import variable

YARDS = Path(__file__).resolve().parents[2] / "deploy" / "yards"
"""The profiles that come with trainyard."""

DEFAULT = "local"

C = TypeVar("C")

VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(:-(?P<default>(?:(?!\$\{)[^}])*))?\}")

PLAIN = (
    *("store", "run_folder", "image", "python", "gpu_memory_gib", "shares_at_once"),
    *("fruitless_attempts", "browse"),
)
TABLES = ("environment", "images", "mounts", "shares", "limits", "schedules", "automations")


def read_profile(name: str = DEFAULT) -> Profile:
    """Read a profile by its name or path; ConfigError if it is not valid."""
    document = read_document(name)
    with naming_file(name):
        return parse_profile(document, profile_name(name))


@contextlib.contextmanager
def naming_file(name: str) -> Iterator[None]:
    """Prefix a ConfigError with the file of the profile."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{show_url(_url(name))}: {error}") from error


def profile_name(name: str) -> str:
    """The name of a yard, from its name or the path of its profile."""
    return basename(name).removesuffix(".toml")


def read_document(name: str) -> dict[str, Any]:
    """The tables of a profile, as written."""
    url = _url(name)
    try:
        text = read_text(url)
    except TrainyardError as error:
        raise ConfigError(f"yard profile {show_url(name)} cannot be read: {error}") from error
    return parse_document(text, ".toml", url)


def _url(name: str) -> str:
    if name.endswith(".toml"):
        return name
    path = YARDS / f"{name}.toml"
    if not path.is_file():
        name = show_url(name)
        known = sorted(file.stem for file in YARDS.glob("*.toml"))
        if not known:
            raise ConfigError(
                f"there is no yard profile {name!r}: profiles are read from {YARDS}, which "
                f"{'has none' if YARDS.is_dir() else 'does not exist'}. They come with the sources "
                f"of trainyard, so start this in a checkout or in the image of the flows; or give "
                f"the path of a .toml, such as --profile /etc/trainyard/mysite.toml"
            )
        raise ConfigError(
            f"there is no yard profile {name!r} in {YARDS}; {suggest(name, known)}, or give the "
            f"path of a .toml"
        )
    return str(path)


def parse_profile(document: Mapping[str, Any], name: str) -> Profile:
    """The profile in a document, with `${VARIABLE}` of this environment filled in.

    Raises ConfigError that names the table and the key at fault."""
    where = f"yard {name}"
    document = filled_in(document, os.environ, where)
    backend = document.get("block", "process")
    if backend not in BACKEND_OPTIONS:
        raise ConfigError(f"{where}: block {backend!r} is not one of {', '.join(BACKEND_OPTIONS)}")
    own = () if BACKEND_OPTIONS[backend] is None else (backend,)
    known = ("block", *PLAIN, *TABLES, "resources", "watch", "deployments", "pool", *own)
    check_known(document, known, where)
    table = {key: value for key, value in document.items() if key in (*PLAIN, *TABLES)}
    table["deployments"] = document.get("deployments", [])
    resources, resources_by_stage = _by_stage(Resources, document, "resources", where)
    watch, watch_by_stage = _by_stage(Watch, document, "watch", where)
    options, options_by_stage = _options(document, backend, where)
    hints = {
        **dict.fromkeys(("store", "browse", "run_folder", "image", "python"), str),
        **{"gpu_memory_gib": float, "deployments": tuple[str, ...]},
        **dict.fromkeys(("shares_at_once", "fruitless_attempts"), int),
        **dict.fromkeys(("environment", "images"), Mapping[str, str]),
        **dict.fromkeys(("shares", "limits"), Mapping[str, int]),
        **{"mounts": tuple[Mount, ...], "automations": Automations},
        "schedules": Mapping[str, FlowSchedule],
    }
    values = {key: convert(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    try:
        return Profile(
            name=name,
            backend=backend,
            resources=resources,
            resources_by_stage=resources_by_stage,
            watch=watch,
            watch_by_stage=watch_by_stage,
            options=options,
            options_by_stage=options_by_stage,
            pool=from_table(Pool, {"name": name, **document.get("pool", {})}, f"{where} [pool]"),
            **values,
        )
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error


def _options(document: Mapping[str, Any], backend: str, where: str) -> tuple[Any, dict[str, Any]]:
    kind = BACKEND_OPTIONS[backend]
    return (None, {}) if kind is None else _by_stage(kind, document, backend, where)


def _by_stage(
    cls: type[C], document: Mapping[str, Any], key: str, where: str
) -> tuple[C, dict[str, C]]:
    """The common options, and those by stage: a stage's table overrides the common one key by key.
    A table that is a field of `cls` is not a stage's."""
    table, where = document.get(key, {}), f"{where} [{key}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    own = [field.name for field in dataclasses.fields(cast(Any, cls))]
    stages = {
        key: value for key, value in table.items() if key not in own and isinstance(value, dict)
    }
    check_known(stages, (*CONFIGS, *own), where)
    common = {key: value for key, value in table.items() if key not in stages}
    by_stage = {
        stage: from_table(cls, {**common, **over}, f"{where[:-1]}.{stage}]")
        for stage, over in stages.items()
    }
    return from_table(cls, common, where), by_stage


def filled_in(value: Any, variables: Mapping[str, str], where: str) -> Any:
    """A document with `${NAME}` and `${NAME:-default}` in its strings replaced by variables."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: _variable(found, variables, where), value)
    if isinstance(value, list):
        return [filled_in(item, variables, where) for item in value]
    if isinstance(value, Mapping):
        return {k: filled_in(item, variables, f"{where}: {k}") for k, item in value.items()}
    return value


def _variable(found: re.Match[str], variables: Mapping[str, str], where: str) -> str:
    name, default = found["name"], found["default"]
    value = variable(name, variables, where) or default
    if value is None:
        raise ConfigError(
            f"{where}: the variable {name} is not set; set it where flows run, or write "
            f"${{{name}:-DEFAULT}}"
        )
    return value
