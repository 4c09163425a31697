"""A training program of one's own on Megatron-LM's command line, with more options beside:
Megatron-LM's `extra_args_provider`.

    raise SystemExit(program(main, MoreOptions))"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stages.runtime.cli import in_our_spelling, known_flags, log_remarks, parse_options
from stages.runtime.common_options import MegatronOptions
from stages.runtime.failure import report_failure
from stages.runtime.help_text import print_help
from trainyard import logging as our_logging
from trainyard.config import dump_toml, flag, leaves
from trainyard.errors import ConfigError, Stopped
from trainyard.training.options.pretrain import PretrainConfig

More = TypeVar("More")

NAME = "pretrain"


def program(
    main: Callable[[PretrainConfig, More], object],
    more: type[More],
    argv: Sequence[str] | None = None,
) -> int:
    """Read the command line of this process, call `main(config, more)`; returns the exit status.

    more: a dataclass. Its fields are flags, keys of --config, and lines of --help, as those of a
    stage are; the text under a field is its help. They are part of what a run is, apart from those
    declared with `trainyard.config.execution` or `course`. `config` is for `pretrain`.

    Errors are one line each, and exit statuses those of a stage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    our_logging.configure()
    try:
        options = with_more_options(more)
        if {"--help", "-h"} & set(arguments):
            print_help(os.path.basename(sys.argv[0]), options, arguments, MegatronOptions)
            return 0
        known = known_flags(NAME, options, MegatronOptions)
        ours, remarks = in_our_spelling(arguments, known)
        config, common = parse_options(options, ours, MegatronOptions, known, remarks)
        our_logging.configure(common.log_level)
        log_remarks(NAME, remarks)
        if common.force:
            raise ConfigError("--force is an option of stages: for a new run, give another --save")
        if common.dry_run:
            print(dump_toml(config), end="")
            return 0
        main(config, config.more)
        return 0
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return report_failure(NAME, error, "--debug" in arguments)


def with_more_options(more: type) -> Any:
    """The class of options of a pretraining, with those of a dataclass in its field `more`.

    Raises ConfigError for a field that has the name of an option."""
    if not (isinstance(more, type) and dataclasses.is_dataclass(more)):
        raise ConfigError(f"more options are a dataclass, not {more!r}")
    taken = {name for name, _, _ in leaves(PretrainConfig)} & {name for name, _, _ in leaves(more)}
    if taken:
        name = min(taken)
        raise ConfigError(f"{more.__name__}.{name}: {flag(name)} exists already; rename the field")
    made = dataclasses.make_dataclass(
        more.__name__,
        [("more", more)],
        bases=(PretrainConfig,),
        namespace={"__doc__": more.__doc__},
        frozen=True,
        kw_only=True,
        slots=True,
    )
    return made
