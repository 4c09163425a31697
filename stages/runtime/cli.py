"""The command line that every stage shares.

    python -m stages.NAME [--config FILE] [flags] [--dry-run] [--force]

Flags come from the stage's configuration class; a document given by --config is overridden by
flags. The stage's own module is imported only when there is work, so --help and a no-op load
neither torch nor data. A stage that takes Megatron-LM's whole command line says so: its other
spellings, its flags that mean nothing here, and its --yaml-cfg are then understood."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_type_hints

import tyro

from stages.runtime import parent_watch
from stages.runtime.failure import report_failure
from stages.runtime.process_exit import exit_now, is_one_of_several
from trainyard import logging as our_logging
from trainyard.config import (
    check_finite,
    check_keys,
    dump_toml,
    other_names,
    parse_document,
    partial_config,
)
from trainyard.errors import ConfigError, Stopped, TrainyardError
from trainyard.version import FLOW_REVISION, FLOW_VERSION, VERSION, build_revision


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that every stage has."""

    config: str | None = None
    """TOML, YAML or JSON document of options (path or URL); flags override it."""
    dry_run: bool = False
    """Print the resolved options as a document that --config reads back, and stop."""
    force: bool = False
    """Run even if the output is up to date."""
    claim_wait_seconds: float = 60.0
    """How long to wait for another run that is writing the same output."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to show."""
    debug: bool = False
    """Show the traceback of an error."""
    version: bool = False
    """Print the version and stop."""


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Options of Megatron-LM's command line, and of guides to it, besides those of the stage."""

    yaml_cfg: str | None = None
    """Megatron-LM's YAML file of options (path or URL), flat or in sections; flags override it."""
    world_size: int | None = None
    """Ranks there are: those of the launcher, or so many to start on this machine."""
    init_method: str | None = None
    """tcp://HOST:PORT where ranks meet that a scheduler started; torchrun knows by itself."""


def stage_main(
    name: str,
    config_class: type,
    run_module: str,
    check_module: str = "",
    *,
    positional: str = "",
    megatron: bool = False,
    argv: Sequence[str] | None = None,
) -> int:
    """Run one stage as a program; returns its exit status. Without `argv` the process is the
    stage's own, and ends here where it is one of several ranks or was told to stop.

    `check_module` has `check_inputs(config)`, which refuses inputs where the stage's own module
    imports torch. `positional` names the option that arguments without a flag in front belong to;
    `megatron` says that the command line is one of Megatron-LM's programs."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _end_at_sigterm()
    modules = (run_module, check_module)
    status = _main(name, config_class, modules, arguments, positional, megatron)
    was_stopped = status > 128
    if argv is None and (is_one_of_several() or was_stopped):
        exit_now(status)
    return status


def _end_at_sigterm() -> None:
    """Until a run has its own handler, SIGTERM ends the process, also where whoever started it
    ignores SIGTERM and so handed that on: torchrun as a job of Slurm
    (flows/backends/slurm/script.py). What comes before the handler takes a while: torch is
    imported, and ranks wait for each other."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _main(
    name: str,
    config_class: type,
    modules: tuple[str, str],
    arguments: list[str],
    positional: str,
    megatron: bool,
) -> int:
    debug = "--debug" in arguments
    our_logging.configure()
    if "--version" in arguments:
        print(f"trainyard {VERSION}, stage {name}")
        return 0
    try:
        parent_watch.stop_with_parent()
        _check_flow(name)
        remarks: list[str] = []
        if megatron:
            arguments, remarks = _in_our_spelling(arguments, config_class)
        else:
            arguments = _with_first_names(arguments, config_class)
        arguments = _with_positional(arguments, positional)
        config, common = _parse(name, config_class, arguments, megatron, remarks)
        our_logging.configure(common.log_level)
        _say(name, remarks)
        if common.dry_run:
            _check_ranks(config)
            print(dump_toml(config), end="")
            return 0
        from stages.runtime.execute import Job, execute  # costs a tenth of a second: not for --help

        job = Job(name, config, *modules, arguments, common.force, common.claim_wait_seconds)
        return execute(job)
    except BrokenPipeError:
        # Whoever read our output has seen enough: `--help | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return report_failure(name, error, debug)


def _check_flow(name: str) -> None:
    """Refuse options that a flow of another version chose and checked; of another build of the
    same version say so, where both know what they were built from."""
    flow = os.environ.get(FLOW_VERSION, VERSION)
    if flow != VERSION:
        raise ConfigError(
            f"this stage is of trainyard {VERSION}, the flow that started it of {flow}: give the "
            f"yard's profile an image (or python) of version {flow}, or the workers {VERSION}"
        )

    ours, theirs = build_revision(), build_revision(name=FLOW_REVISION)
    is_first = os.environ.get("RANK", "0") == "0" and not _is_a_rank_of_ours()
    if ours and theirs and ours != theirs and is_first:
        logging.getLogger(f"stages.{name}").warning(
            "this stage is trainyard %s built from revision %s, the flow that started it from %s: "
            "build the images of both from one revision",
            *(VERSION, ours, theirs),
        )


def _check_ranks(config: Any) -> None:
    """As a run does. One process without a launcher may be meant for any number under one."""
    if hasattr(config, "check_ranks"):
        from stages.runtime import ranks

        count = ranks.num_ranks(config)
        config.check_ranks(count if count > 1 or "RANK" in os.environ else None)


# --- options ----------------------------------------------------------------------------------


def _with_positional(arguments: list[str], option: str) -> list[str]:
    count = next((i for i, a in enumerate(arguments) if a.startswith("-")), len(arguments))
    if not option or not count:
        return arguments
    return ["--" + option, *arguments[:count], *arguments[count:]]


def _with_first_names(arguments: list[str], config_class: type) -> list[str]:
    """Flags under the names that options go by in documents and in --help."""
    flags = {_flag(other): _flag(name) for other, name in other_names(config_class).items()}
    named = []
    for argument in arguments:
        given, equals, value = argument.partition("=")
        named.append(flags.get(given.replace("_", "-"), given) + equals + value)
    return named


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _in_our_spelling(arguments: list[str], config_class: type) -> tuple[list[str], list[str]]:
    """A command line of Megatron-LM, and what is to be said about it."""
    if {"--help", "-h"} & set(arguments):
        return ["--help"], []
    from trainyard.megatron_cli.command import understand

    options = (*dataclasses.fields(CommonOptions), *dataclasses.fields(MegatronOptions))
    more = [field.name.replace("_", "-") for field in options]
    understood = understand(arguments, config_class, os.environ, more)
    os.environ.update(understood.environment)
    return understood.arguments, understood.remarks


def _say(name: str, remarks: list[str]) -> None:
    """Once, not on every rank."""
    if os.environ.get("RANK", "0") == "0" and not _is_a_rank_of_ours():
        for remark in remarks:
            logging.getLogger(f"stages.{name}").info("%s", remark)


def _is_a_rank_of_ours() -> bool:
    """Whether this process is a rank that a parent of the same command started."""
    return "TRAINYARD_RANKS" in os.environ


def _parse(
    name: str, config_class: type, arguments: list[str], megatron: bool, remarks: list[str]
) -> tuple[Any, CommonOptions]:
    document = _document(config_class, _url_of("--config", arguments))
    yaml_cfg = _url_of("--yaml-cfg", arguments) if megatron else None
    where = "--config"
    if yaml_cfg is not None:
        if document:
            raise ConfigError("--config and --yaml-cfg each hold the options of a run; give one")
        where = f"--yaml-cfg {yaml_cfg}"
        document, more = _yaml_document(config_class, yaml_cfg, where, arguments)
        remarks += more
    common = Annotated[CommonOptions, tyro.conf.FlagCreatePairsOff]
    parts = [("stage", config_class), ("common", common)]
    given: list[Any] = [partial_config(config_class, document, where, tyro.MISSING)]
    given.append(CommonOptions())
    if megatron:
        parts.append(("megatron", MegatronOptions))
        given.append(MegatronOptions())
    both = dataclasses.make_dataclass("Options", parts)
    default = both(*given)
    for cls in (config_class, CommonOptions, MegatronOptions):
        _write_out_unions(cls)
    parsed: Any = tyro.cli(
        both,
        prog=f"python -m stages.{name}",
        description=_description(config_class),
        args=arguments,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    check_finite(parsed.stage)
    check_finite(parsed.common)
    return parsed.stage, parsed.common


def _write_out_unions(cls: type) -> None:
    """Name the `X | Y` of a configuration's fields Union[X, Y], which is the same type.

    tyro 1.0 looks through a Union by itself. For the other it imports a checker of types, which
    takes a tenth of a second: a third of what a command takes to start."""
    hints = get_type_hints(cls, include_extras=True)
    for owner in cls.__mro__:
        for name in vars(owner).get("__annotations__", ()):
            if isinstance(hints.get(name), types.UnionType):
                owner.__annotations__[name] = Union[hints[name].__args__]  # noqa: UP007
    for hint in hints.values():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            _write_out_unions(hint)


def _description(config_class: type) -> str:
    return (config_class.__doc__ or "").strip()


def _url_of(option: str, arguments: list[str]) -> str | None:
    given = [a.partition("=")[2] for a in arguments if a.startswith(option + "=")]
    given += [b for a, b in pairwise(arguments) if a == option]
    if len(given) > 1:
        raise ConfigError(f"{option} is given {len(given)} times; put all options in one document")
    return given[0] if given else None


def _document(config_class: type, url: str | None) -> dict[str, Any]:
    if url is None:
        return {}
    text = _text_of("--config", url)
    document = parse_document(text, Path(url).suffix, f"--config {url}")
    check_keys(config_class, document, f"--config {url}")
    return document


def _yaml_document(
    config_class: type, url: str, where: str, arguments: list[str]
) -> tuple[dict[str, Any], list[str]]:
    from trainyard.megatron_cli.options import split_options
    from trainyard.megatron_cli.yaml_cfg import read_yaml_cfg

    given = {option.name: " ".join(option.values) for option in split_options(arguments)[1]}
    document, remarks = read_yaml_cfg(
        _text_of("--yaml-cfg", url), config_class, os.environ, where, given
    )
    check_keys(config_class, document, where)
    return document, [*remarks, f"{where}: flags of the command line go over the file"]


def _text_of(option: str, url: str) -> str:
    from trainyard.artifacts import store  # not for --help

    try:
        return store.read_bytes(url).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {url}: not a text file: {error}") from error
    except TrainyardError as error:
        raise ConfigError(f"{option}: {error}") from error
