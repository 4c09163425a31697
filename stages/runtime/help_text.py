"""What --help prints."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, Union, get_type_hints

from stages.runtime.common_options import CommonOptions, MegatronOptions, YamlOptions
from trainyard.config import VARIANTS, partial_config, variants_of
from trainyard.megatron_cli.options import split_options


def print_help(prog: str, config_class: type, arguments: list[str], more: type | None) -> None:
    """Print all options; with a flag such as --model-type, those of the class that it chooses."""
    import tyro  # 0.2 s, for --help only

    given = {option.name.replace("-", "_"): option.values for option in split_options(arguments)[1]}
    keys = (variants.key for variants in variants_of(config_class))
    chosen = {key: given[key][0] for key in keys if given.get(key)}
    # The description stands above all options, so it is left out above those of the stage.
    parts: list[tuple[str, Any]] = [("stage", Annotated[config_class, tyro.conf.arg(help="")])]
    parts.append(("common", Annotated[CommonOptions, tyro.conf.FlagCreatePairsOff]))
    parts += [("megatron", more)] if more is not None else []
    default: list[Any] = [partial_config(config_class, chosen, "--help", tyro.MISSING)]
    default += [CommonOptions(), *([more()] if more is not None else [])]
    for cls in (config_class, CommonOptions, YamlOptions, MegatronOptions):
        _annotate(cls)
    both = dataclasses.make_dataclass("Options", parts)
    with suppress(SystemExit):
        tyro.cli(
            both,
            prog=prog,
            description=_paragraphs(config_class.__doc__ or ""),
            args=["--help"],
            default=both(*default),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )


def _paragraphs(text: str) -> str:
    """A docstring without its indentation and line ends; blank lines stay between paragraphs."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _texts_under_fields(owner: type) -> dict[str, str]:
    """The string literal under each field of a class, by the name of the field; none of a class
    whose source is not found, such as that of a program that makes its options."""
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):
        return {}
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: under.value.value
        for field, under in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
        if isinstance(under.value.value, str)
    }


def _annotate(cls: type) -> None:
    """Rewrite the annotations of a configuration as tyro prints them best.

    - The text under a field, as its help: tyro alone keeps the line ends of the source.
    - `bool | None` as a flag with its negation, as it is read, which tyro knows for bool alone.
    - `X | Y` as Union[X, Y], which is the same type. tyro 1.0 resolves a Union itself. For `X | Y`
      it imports a type checker, which takes a tenth of a second: a third of the start of a
      command."""
    import tyro

    hints = get_type_hints(cls, include_extras=True)
    for owner in cls.__mro__:
        own = vars(owner).get("__annotations__", {})
        texts = _texts_under_fields(owner) if own else {}
        for name in own:
            hint = hints.get(name)
            shown: dict[str, Any] = {}
            if hint == bool | None:
                shown = {"metavar": "", "aliases": (f"--no-{name.replace('_', '-')}",)}
            if isinstance(hint, types.UnionType):
                hint = Union[hint.__args__]  # noqa: UP007
                owner.__annotations__[name] = hint
            if text := _paragraphs(texts.get(name, "")):
                owner.__annotations__[name] = Annotated[hint, tyro.conf.arg(help=text, **shown)]
    for field in dataclasses.fields(cls):
        variants = field.metadata.get(VARIANTS)
        nested = [hints[field.name]] if variants is None else variants.classes.values()
        for hint in nested:
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                _annotate(hint)
