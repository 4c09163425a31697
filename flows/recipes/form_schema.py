"""The form of a flow in Prefect's pages, made of the schema that Prefect derives from the flow.

A field that is left empty must send nothing, so that the recipe decides. Both generations of the
pages send the default of each field that has one, and offer two types where a parameter may be
null. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.recipes.overrides import DECIDED, names_of
from flows.recipes.recipe import stage_of
from flows.stage_configs import CONFIGS

RECIPE, STAGE = "recipe", "stage"
PRESETS = "models"
"""Folder of recipes/ whose files are options of pretrain, so no recipes."""

NULL = {"type": "null"}
ADVICE = "text without a user or password in a URL: give those in the environment of the worker"
OVERRIDES = "overrides"
SIMPLE = r"^(?:[ \t]*(?:#[^\n]*|[\w.-]+[ \t]*=[^\n]*)?(?:\n|$))*$"
"""Text of lines NAME = VALUE alone, in which no line is part of a longer value."""
LINE = r"(?:^|\n)[ \t]*"
PASSWORD = re.compile(r"://([^/?#\s]*@|[^/?#\s:]*:(?![0-9]{1,5}([/?#\s]|$))[^\s]{1,256}@)")
"""A URL with a user, or with what is no port and so a password, which may have a `/`."""
CONTENTS = "contents"
NO_PASSWORD = {
    "if": {"type": "string", "pattern": PASSWORD.pattern},
    "then": {"enum": [ADVICE]},
    "else": {"$ref": f"#/definitions/{CONTENTS}"},
}
"""Refuses a URL with a user, in tables and lists too, when a run is created: so the server never
keeps it."""
DEFINITIONS = {
    CONTENTS: {
        "propertyNames": NO_PASSWORD,
        "additionalProperties": NO_PASSWORD,
        "items": NO_PASSWORD,
    }
}
TEXTS = ("array", "object", "string")
"""Types of JSON that may hold a text."""
TITLES = {"string": "lines", "object": "table"}
"""Of the types among which a form lets choose."""


def form_schema(
    schema: Mapping[str, Any],
    recipes: Sequence[str],
    flow: str = "",
) -> dict[str, Any]:
    """The schema of a form, by which the server also checks the parameters of a run.

    recipes: those that the form offers, beside a path or URL. flow: whose options `overrides` may
    name."""
    fields = {name: _field(field) for name, field in schema["properties"].items()}
    if RECIPE in fields:
        fields[RECIPE] = _choice(fields[RECIPE], recipes)
    if STAGE in fields:
        fields[STAGE]["enum"] = sorted(CONFIGS)
    if OVERRIDES in fields and flow:
        fields[OVERRIDES]["then"]["allOf"] = list(_refusals(flow))
    definitions = {**schema.get("definitions", {}), **DEFINITIONS}
    return {
        **schema,
        "properties": fields,
        # The refusal of a name lists those that exist, which that of additionalProperties does not.
        "propertyNames": {"enum": list(fields)},
        "definitions": definitions,
    }


def _refusals(flow: str) -> Iterator[dict[str, Any]]:
    """Refuse an unknown name in lines STAGE.KEY = VALUE when a run is created.

    Other texts are left to the flow, and so is the nearest name: a schema can only say what is
    allowed."""
    names = names_of(flow)
    keys, stages = names.pop(""), list(names)
    either = rf"(?:{'|'.join(stages)})\.|(?:{'|'.join(keys)})[ \t]*="
    yield _refusal(
        rf"{LINE}(?!{either})[\w-][^\n=]*=",
        f"lines of STAGE.KEY = VALUE; stages: {', '.join(stages)}; or KEY = VALUE; keys: "
        f"{', '.join(keys)}",
    )
    for stage in stages:
        decided = DECIDED.get(stage_of(stage), ())
        but = f" but {', '.join(decided)}, which the flow decides" if decided else ""
        yield _refusal(
            rf"{LINE}{stage}\.(?!(?:{'|'.join(names[stage])})[ \t]*=)[^\n=]*=",
            f"options of {stage}{but}; python -m stages.{stage_of(stage)} --help lists them",
        )


def _refusal(pattern: str, advice: str) -> dict[str, Any]:
    patterns = [{"pattern": one} for one in (SIMPLE, pattern)]
    return {"if": {"type": "string", "allOf": patterns}, "then": {"enum": [advice]}}


def recipes_in(sources: Path) -> list[str]:
    """The recipes in a folder of sources, as paths below it."""
    found = sorted((sources / "recipes").rglob("*.toml"))
    paths = [file.relative_to(sources) for file in found]
    return [str(path) for path in paths if PRESETS not in path.parts]


def _field(field: Mapping[str, Any]) -> dict[str, Any]:
    """Without null, as type or default: it is what is sent for nothing."""
    found = {key: value for key, value in field.items() if key != "default" or value is not None}
    types = [one for one in found.pop("anyOf", []) if one != NULL]
    if len(types) == 1:
        # The server would say "not valid under any of the given schemas"; this names the type.
        kind = types[0]["type"]
        then = {"type": [kind, "null"], **(NO_PASSWORD if kind in TEXTS else {})}
        return {**types[0], "if": True, "then": then, **found}
    if any(one.get("type") in TEXTS for one in (found, *types)):
        found |= NO_PASSWORD
    if types:
        found["anyOf"] = [{"title": TITLES.get(one["type"], one["type"]), **one} for one in types]
    return found


def _choice(field: Mapping[str, Any], recipes: Sequence[str]) -> dict[str, Any]:
    """One of the recipes, or any text."""
    if not recipes:
        return dict(field)
    offered = {"title": "of the sources", "type": "string", "enum": list(recipes)}
    free = {"title": "path or URL", "type": "string"}
    rest = {key: value for key, value in field.items() if key != "type"}
    return {**rest, "anyOf": [offered, free]}
