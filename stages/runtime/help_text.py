"""What --help prints."""

from __future__ import annotations

import dataclasses
import types
from contextlib import suppress
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
    parts: list[tuple[str, Any]] = [("stage", config_class)]
    parts.append(("common", Annotated[CommonOptions, tyro.conf.FlagCreatePairsOff]))
    parts += [("megatron", more)] if more is not None else []
    default: list[Any] = [partial_config(config_class, chosen, "--help", tyro.MISSING)]
    default += [CommonOptions(), *([more()] if more is not None else [])]
    for cls in (config_class, CommonOptions, YamlOptions, MegatronOptions):
        _write_out_unions(cls)
    both = dataclasses.make_dataclass("Options", parts)
    with suppress(SystemExit):
        tyro.cli(
            both,
            prog=prog,
            description=(config_class.__doc__ or "").strip(),
            args=["--help"],
            default=both(*default),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )


def _write_out_unions(cls: type) -> None:
    """Write the `X | Y` of a configuration's fields as Union[X, Y], which is the same type.

    tyro 1.0 resolves a Union itself. For `X | Y` it imports a type checker, which takes a tenth of
    a second: a third of the start of a command."""
    hints = get_type_hints(cls, include_extras=True)
    for owner in cls.__mro__:
        for name in vars(owner).get("__annotations__", ()):
            if isinstance(hints.get(name), types.UnionType):
                owner.__annotations__[name] = Union[hints[name].__args__]  # noqa: UP007
    for field in dataclasses.fields(cls):
        variants = field.metadata.get(VARIANTS)
        nested = [hints[field.name]] if variants is None else variants.classes.values()
        for hint in nested:
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                _write_out_unions(hint)
