"""The command line that every stage shares.

    python -m stages.NAME [--config FILE] [flags] [--dry-run] [--force]

Flags come from the stage's configuration class; a document given by --config is overridden by
flags. The stage's own module is imported only when there is work, so --help and a no-op load
neither torch nor data."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from stages import lifeline
from stages.failure import report_failure
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
from trainyard.version import VERSION


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that every stage has."""

    config: str | None = None
    """TOML, YAML or JSON document of options (path or URL); flags override it."""
    dry_run: bool = False
    """Print the resolved options as a document that --config reads back, and stop."""
    force: bool = False
    """Run although the output is there and nothing changed."""
    claim_wait_seconds: float = 60.0
    """How long to wait for another run that is writing the same output."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to show."""
    debug: bool = False
    """Show the traceback of an error."""
    version: bool = False
    """Print the version and stop."""


def stage_main(
    name: str,
    config_class: type,
    run_module: str,
    *,
    positional: str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Run one stage as a program; returns its exit status.

    `positional` names the option that arguments without a flag in front belong to."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    our_logging.configure()
    if "--version" in arguments:
        print(f"trainyard {VERSION}, stage {name}")
        return 0
    try:
        lifeline.hold()
        arguments = _with_first_names(arguments, config_class)
        config, common = _parse(name, config_class, _with_positional(arguments, positional))
        our_logging.configure(common.log_level)
        if common.dry_run:
            print(dump_toml(config), end="")
            return 0
        from stages.execute import Job, execute  # costs a tenth of a second: not for --help

        job = Job(name, config, run_module, arguments, common.force, common.claim_wait_seconds)
        return execute(job)
    except BrokenPipeError:
        # Whoever read our output has seen enough: `--help | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return report_failure(name, error, debug)


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


def _parse(name: str, config_class: type, arguments: list[str]) -> tuple[Any, CommonOptions]:
    document = _document(config_class, _config_url(arguments))
    common = Annotated[CommonOptions, tyro.conf.FlagCreatePairsOff]
    both = dataclasses.make_dataclass("Options", [("stage", config_class), ("common", common)])
    default = both(
        partial_config(config_class, document, "--config", tyro.MISSING), CommonOptions()
    )
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


def _description(config_class: type) -> str:
    return (config_class.__doc__ or "").strip()


def _config_url(arguments: list[str]) -> str | None:
    given = [a.partition("=")[2] for a in arguments if a.startswith("--config=")]
    given += [b for a, b in pairwise(arguments) if a == "--config"]
    if len(given) > 1:
        raise ConfigError(f"--config is given {len(given)} times; put all options in one document")
    return given[0] if given else None


def _document(config_class: type, url: str | None) -> dict[str, Any]:
    if url is None:
        return {}
    from trainyard.artifacts import store  # not for --help
    from trainyard.artifacts.urls import basename

    try:
        text = store.read_bytes(url).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {url}: not a text file: {error}") from error
    except TrainyardError as error:
        raise ConfigError(f"--config: {error}") from error
    document = parse_document(text, Path(basename(url)).suffix, f"--config {url}")
    check_keys(config_class, document, f"--config {url}")
    return document
