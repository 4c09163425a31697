"""Forms for flow parameters in Prefect's pages: every option of a stage, with its meaning, default
and choices. Pure; generated from the configuration classes of the stages.

A parameter is a table of options that override those of the recipe. So no option is required and
none has an initial value; the description states its default."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field
from typing import Any, Literal

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from flows.stage_configs import CONFIGS
from trainyard.config import leaves

DECIDED: dict[str, tuple[str, ...]] = {
    "collect": ("output_dir",),
    "train_tokenizer": ("input", "output_dir"),
    "tokenize": ("input", "output_prefix", "rank", "world_size"),
    "merge": ("input", "output_prefix"),
    "plan": ("output_dir", "json"),
    "pretrain": ("data_path", "save"),
    "reshard": ("load_dir", "save_dir"),
    "evaluate": ("load", "valid_data", "output_dir"),
    "benchmark": ("load", "output_dir"),
}
"""Options that flows decide, which no form shows."""

SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


class OptionsOf:
    """Annotation of a parameter that holds options of a stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema of the form; the server also checks a run's parameters with it."""
        return options_schema(self.stage)


Collect = typing.Annotated[dict[str, Any], OptionsOf("collect")]
TrainTokenizer = typing.Annotated[dict[str, Any], OptionsOf("train_tokenizer")]
Tokenize = typing.Annotated[dict[str, Any], OptionsOf("tokenize")]
Merge = typing.Annotated[dict[str, Any], OptionsOf("merge")]
Plan = typing.Annotated[dict[str, Any], OptionsOf("plan")]
Pretrain = typing.Annotated[dict[str, Any], OptionsOf("pretrain")]
Reshard = typing.Annotated[dict[str, Any], OptionsOf("reshard")]
Evaluate = typing.Annotated[dict[str, Any], OptionsOf("evaluate")]
Benchmark = typing.Annotated[dict[str, Any], OptionsOf("benchmark")]


EMPTY: dict[str, Any] = {}
"""An empty form; read only. Not None: the pages would send that as a wrong type."""


@functools.cache
def options_schema(stage: str) -> dict[str, Any]:
    """JSON schema of a table of a stage's options, all optional."""
    cls = CONFIGS[stage]
    docs = _documents(cls)
    return {
        "type": "object",
        "title": f"[{stage}]",
        "description": f"Overrides the recipe's [{stage}]. {_sentence(inspect.getdoc(cls) or '')}",
        "properties": {
            name: _property(name, annotation, field, docs.get(name, ""))
            for name, annotation, field in leaves(cls)
            if name not in DECIDED.get(stage, ())
        },
        "additionalProperties": False,
    }


def non_empty(overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of a form without empty options."""
    tables = {
        stage: {key: value for key, value in table.items() if value is not None}
        for stage, table in overrides.items()
    }
    return {stage: table for stage, table in tables.items() if table}


def _property(name: str, annotation: Any, field: Field[Any], doc: str) -> dict[str, Any]:
    if field.default is MISSING and field.default_factory is MISSING:
        default = "Required, here or in the recipe."
    else:
        value = field.default_factory() if callable(field.default_factory) else field.default
        default = "" if value in (None, "") else f"Default: {_shown(value)}."
    text = " ".join(part for part in (doc, default) if part)
    return {"title": name, "description": text, **type_schema(annotation)}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def type_schema(annotation: Any) -> dict[str, Any]:
    """JSON schema of the type of an option."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [arg for arg in args if arg is not types.NoneType]
        return type_schema(inner)
    if origin is Literal:
        return {"enum": list(args), "type": SCALARS[type(args[0])]}
    if origin is tuple:
        return {"type": "array", "items": type_schema(args[0])}
    return {"type": SCALARS[annotation]}


# --- documentation of options in the sources ------------------------------------------------------


def _documents(cls: type) -> dict[str, str]:
    """The docstring of each field of a configuration class, its bases and its parts."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object and "__annotations__" in vars(base):
            found.update(_texts_of(base))
    for annotation in typing.get_type_hints(cls).values():
        if isinstance(annotation, type) and hasattr(annotation, "__dataclass_fields__"):
            found.update(_documents(annotation))
    return found


@functools.cache
def _texts_of(cls: type) -> dict[str, str]:
    """The string literals below the fields of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())
