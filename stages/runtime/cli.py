"""The command line that every stage shares.

    python -m stages.NAME [--config FILE] [flags] [--dry-run] [--force]

Flags come from the stage's configuration class, and override the document that --config names. The
stage's own module is imported only when there is work, so --help and a no-op load neither torch nor
data. With `megatron=True` a stage accepts the command line of Megatron-LM's program for the same
work: its other spellings, its flags that have no effect here, and its --yaml-cfg."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.runtime import parent_watch
from stages.runtime.batch import check_outputs, options_of_runs
from stages.runtime.common_options import CommonOptions, MegatronOptions, YamlOptions
from stages.runtime.failure import RunOutcome, report_failure, report_outcomes
from stages.runtime.flags import check_required, read_flags
from stages.runtime.help_text import print_help
from stages.runtime.process_exit import exit_now, is_one_of_several, reader_is_gone
from trainyard import logging as our_logging
from trainyard.config import (
    check_keys,
    dump_toml,
    from_dict,
    leaves,
    other_names,
    partial_config,
)
from trainyard.config_text import parse_document
from trainyard.errors import ConfigError, Stopped, TrainyardError
from trainyard.megatron_cli.options import split_options
from trainyard.version import FLOW_REVISION, FLOW_VERSION, VERSION, build_revision

if TYPE_CHECKING:
    from trainyard.megatron_cli.spellings import Vocabulary


def stage_main(
    name: str,
    config_class: type,
    run_module: str,
    check_module: str = "",
    *,
    positional: str = "",
    megatron: bool = False,
    program: str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Run one stage as a program; returns its exit status. Without `argv` it runs the command line
    of this process, and exits here if this is one rank of several or a signal stopped the run.

    `check_module` has `check_inputs(config)`, for a stage whose own module imports torch.
    `positional` names the option that takes leading arguments without a flag. `megatron`: accept
    the command line of Megatron-LM's program for this work (`trainyard.megatron_cli.tools`).
    `program`: the command, if it is not that of the stage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _end_at_signals()
    modules = (run_module, check_module)
    reader = OptionReader(config_class, program or name, positional, megatron)
    status = _main(name, reader, modules, arguments)
    was_stopped = status > 128
    if argv is None and (is_one_of_several() or was_stopped):
        exit_now(status)
    return status


def _end_at_signals() -> None:
    """Let SIGTERM and SIGUSR1 end the process until the run installs its own handlers.

    A process inherits ignored signals from its parent, such as torchrun in a Slurm job
    (flows/backends/slurm/script.py). Importing torch and waiting for ranks takes a while before
    the handlers are installed."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class OptionReader:
    """How the command line of a program becomes options; see `stage_main`."""

    config_class: type
    program: str
    positional: str
    megatron: bool


def _main(name: str, reader: OptionReader, modules: tuple[str, str], arguments: list[str]) -> int:
    debug = "--debug" in arguments
    our_logging.configure()
    if "--version" in arguments:
        print(f"trainyard {VERSION}, stage {name}")
        return 0
    try:
        parent_watch.stop_with_parent()
        _check_flow(name)
        remarks: list[str] = []
        more = _more_options(name) if reader.megatron else None
        if {"--help", "-h"} & set(arguments):
            prog = f"python -m stages.{reader.program}"
            print_help(prog, reader.config_class, arguments, more)
            return 0
        known = known_flags(name, reader.config_class, more) if reader.megatron else None
        if known is not None:
            arguments, remarks = in_our_spelling(arguments, known)
        arguments = _with_positional(arguments, reader.positional)
        configs, common = parse_runs(reader.config_class, arguments, more, known, remarks)
        our_logging.configure(common.log_level)
        log_remarks(reader.program, remarks)
        configs = list(map(_resolved, configs))
        if common.dry_run:
            for config in configs:
                _check_ranks(config)
            print("\n".join(map(dump_toml, configs)), end="")
            return 0
        from stages.runtime.execute import (  # costs a tenth of a second: not for --help
            StageInvocation,
            execute,
        )
        from trainyard.artifacts.abandoned import Abandoned

        rest = (*modules, arguments, common.force, common.claim_wait_seconds)
        if len(configs) == 1:
            return execute(StageInvocation(name, configs[0], *rest))
        outcomes: list[RunOutcome] = []
        abandoned = Abandoned()
        for config in configs:
            execute(StageInvocation(name, config, *rest, outcomes, abandoned))
        report_outcomes(outcomes)
        return 0
    except BrokenPipeError:
        return reader_is_gone()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("trainyard", "stages"):
            return report_failure(name, error, debug, reader.program)
        extra = f"trainyard[{name.replace('_', '-')}]"
        missing = f"{sys.executable} has no module {error.name}: install {extra} there"
        return report_failure(name, ConfigError(missing), debug, reader.program)
    except (Exception, Stopped, KeyboardInterrupt) as error:
        return report_failure(name, error, debug, reader.program)


def _check_flow(name: str) -> None:
    """Refuse options that a flow of another version chose and checked; warn about another build of
    the same version, if both revisions are known."""
    flow = os.environ.get(FLOW_VERSION, VERSION)
    if flow != VERSION:
        raise ConfigError(
            f"this stage runs trainyard {VERSION}, but the flow that started it runs {flow}: give "
            f"the yard's profile an image (or python) of version {flow}, or install {VERSION} on "
            "the workers"
        )

    ours, theirs = build_revision(), build_revision(name=FLOW_REVISION)
    is_first = os.environ.get("RANK", "0") == "0" and not _is_spawned_rank()
    if ours and theirs and ours != theirs and is_first:
        logging.getLogger(f"stages.{name}").warning(
            "this stage runs trainyard %s of revision %s, but the flow that started it runs %s: "
            "build the images of both from one revision",
            *(VERSION, ours, theirs),
        )


def _resolving(config_class: type) -> Any:
    """The module that computes options from others, from data and from ranks, for a configuration
    that names one: `beneath(given)` and `resolved(config, world_size)`."""
    name = getattr(config_class, "RESOLVED_BY", None)
    return None if name is None else importlib.import_module(name)


def _resolved(config: Any) -> Any:
    """The options, with those that depend on data or ranks computed."""
    resolving = _resolving(type(config))
    if resolving is None:
        return config
    from stages.runtime import ranks

    return resolving.resolved(config, ranks.num_ranks(config))


def _check_ranks(config: Any) -> None:
    """Check the layout as a run does. A single process without a launcher does not determine the
    number of ranks, since a launcher may run the same command."""
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


def _more_options(name: str) -> type | None:
    """Options of Megatron-LM's program that are not options of the stage."""
    from trainyard.megatron_cli.tools import TOOLS

    if name not in TOOLS:
        return MegatronOptions
    return YamlOptions if name == "plan" else None


def known_flags(name: str, config_class: type, more: type | None) -> Vocabulary:
    """What the flags of Megatron-LM mean to the stage."""
    from trainyard.megatron_cli.spellings import ToolVocabulary, flag, vocabulary
    from trainyard.megatron_cli.tools import TOOLS

    classes = (CommonOptions, *((more,) if more is not None else ()))
    flags = tuple(flag(field.name) for cls in classes for field in dataclasses.fields(cls))
    tool = TOOLS.get(name)
    if tool is None:
        return vocabulary(config_class, flags)
    compared: Collection[str] = ()
    if tool.checks_model:
        from trainyard.models.expected import COMPARED

        compared = COMPARED
    return ToolVocabulary(config_class, flags, tool, _flags_of_training, compared)


def _flags_of_training() -> Vocabulary:
    """What flags mean to a training; importing its options takes 0.2 s."""
    from trainyard.megatron_cli.spellings import vocabulary
    from trainyard.megatron_cli.tools import OF_STAGE_PRETRAIN
    from trainyard.training.options.pretrain import PretrainConfig

    return vocabulary(PretrainConfig, OF_STAGE_PRETRAIN)


def in_our_spelling(arguments: list[str], known: Vocabulary) -> tuple[list[str], list[str]]:
    """The options of a Megatron-LM command line in our spelling, and remarks to log about it."""
    from trainyard.megatron_cli.command import understand

    understood = understand(arguments, known, os.environ)
    os.environ.update(understood.environment)
    return understood.arguments, understood.remarks


def log_remarks(program: str, remarks: list[str]) -> None:
    """Log the remarks once, not on every rank."""
    if os.environ.get("RANK", "0") == "0" and not _is_spawned_rank():
        for remark in remarks:
            logging.getLogger(f"stages.{program}").info("%s", remark)


def _is_spawned_rank() -> bool:
    """Whether this process is a rank that a parent of the same command started."""
    return "TRAINYARD_RANKS" in os.environ


def parse_options(
    config_class: type,
    arguments: list[str],
    more: type | None,
    known: Vocabulary | None,
    remarks: list[str],
) -> tuple[Any, CommonOptions]:
    """As `parse_runs`, for a program that makes one run."""
    (config,), common = parse_runs(config_class, arguments, more, known, remarks)
    return config, common


def parse_runs(
    config_class: type,
    arguments: list[str],
    more: type | None,
    known: Vocabulary | None,
    remarks: list[str],
) -> tuple[list[Any], CommonOptions]:
    """The configurations of a command line and its documents, one unless a document lists several
    runs (`batch`), and the options of every stage. remarks: gets those of the documents."""
    classes = (config_class, CommonOptions, *((more,) if more is not None else ()))
    flags = read_flags(arguments, *classes)
    documents: list[dict[str, Any]] = [{}]
    where = "--config"
    url, yaml_cfg = flags.pop("config", None), flags.pop("yaml_cfg", None)
    _refuse_two_documents(arguments)
    if url is not None:
        where = f"--config {url}"
        documents = options_of_runs(config_class, _document(url, where), where)
    if yaml_cfg is not None:
        if documents != [{}]:
            raise ConfigError("--config and --yaml-cfg each hold the options of a run; give one")
        where = f"--yaml-cfg {yaml_cfg}"
        document, said = _yaml_document(config_class, known, yaml_cfg, where, arguments)
        documents = [document]
        remarks += said
    common = {name: flags.pop(name) for name, _, _ in leaves(CommonOptions) if name in flags}
    where = where if documents != [{}] else "the command line"
    configs = [_config_of(config_class, one, flags, where, remarks) for one in documents]
    check_outputs(configs, where)
    return configs, CommonOptions(**common)


def _config_of(
    config_class: type,
    document: dict[str, Any],
    flags: dict[str, Any],
    where: str,
    remarks: list[str],
) -> Any:
    """The configuration of a document, whose options flags override."""
    others = other_names(config_class)
    given = {others.get(name, name): value for name, value in document.items()} | flags
    resolving = _resolving(config_class)
    if resolving is not None:
        below, said = resolving.beneath(given)
        remarks += said
        given = below | given
    check_required(partial_config(config_class, given, where))
    return from_dict(config_class, given, where)


def _refuse_two_documents(arguments: list[str]) -> None:
    names = [option.name for option in split_options(arguments)[1]]
    for name in ("config", "yaml-cfg"):
        if (count := names.count(name)) > 1:
            raise ConfigError(f"--{name} is given {count} times; put all options in one document")


def _document(url: str, where: str) -> dict[str, Any]:
    from trainyard.artifacts.documents import suffix

    return parse_document(_text_of("--config", url), suffix(url), where)


def _yaml_document(
    config_class: type, known: Vocabulary | None, url: str, where: str, arguments: list[str]
) -> tuple[dict[str, Any], list[str]]:
    from trainyard.megatron_cli.yaml_cfg import read_yaml_cfg

    given = {option.name: " ".join(option.values) for option in split_options(arguments)[1]}
    document, remarks = read_yaml_cfg(
        _text_of("--yaml-cfg", url), config_class, os.environ, where, given, known
    )
    check_keys(config_class, document, where)
    return document, [*remarks, f"{where}: flags of the command line override the file"]


def _text_of(option: str, url: str) -> str:
    from trainyard.artifacts.documents import read_text  # not for --help

    try:
        return read_text(url)
    except TrainyardError as error:
        raise ConfigError(f"{option}: {error}") from error
