"""Rules for flags that say something about a run: its checkpoints, data, optimizer and log. Each
returns the options that stand for the flag."""

from __future__ import annotations

import signal as signals

from trainyard.errors import ConfigError
from trainyard.megatron_cli.command_line import CommandLine, Rule
from trainyard.megatron_cli.options import Option, is_number
from trainyard.megatron_cli.text_rules import answers_questions, questions_file

LEVELS = {"10": "debug", "20": "info", "30": "warning", "40": "error"}
"""The levels of --log-level, by Python's numbers."""

STOPPING = (signals.SIGTERM, signals.SIGINT, signals.SIGUSR1)
"""Signals that make a run save and stop, whatever --exit-signal says (stages.runtime.context)."""

WEIGHTS_ALONE = "--finetune loads only the weights anyway"

NO_NEIGHBORS = "instruction data has no neighbours in a project"

PROJECT = ("retro-project-dir", "retro-workdir")
LENGTH = ("train-iters", "train-steps")
DOCUMENTS = ("config", "yaml-cfg")
"""Files that may set any option."""


def _logging_level(line: CommandLine, option: Option) -> list[Option]:
    if option.value not in LEVELS:
        levels = ", ".join(f"{level} ({number})" for number, level in LEVELS.items())
        raise ConfigError(f"{option.given} {option.value}: give --log-level, one of {levels}")
    return [Option(option.given, "log-level", [LEVELS[option.value]])]


def _ckpt_step(line: CommandLine, option: Option) -> list[Option]:
    load = line.last("load")
    if load is None:
        raise ConfigError(f"{option.given} is a step of --load; give --load too")
    load.values = [f"{load.value.rstrip('/')}/iter_{option.number:07d}"]
    return []


def _pretrained_checkpoint(line: CommandLine, option: Option) -> list[Option]:
    """Initial weights. A run that has saved steps of its own resumes from those instead."""
    load, save = line.last("load"), line.last("save")
    if load is not None and (save is None or load.value != save.value):
        raise ConfigError(
            f"{option.given} and --load name two checkpoints to begin with; give only --load, "
            "with --finetune for its weights alone, or without to resume"
        )
    if load is not None:
        line.options = [o for o in line.options if o.name != "load"]
    # Messages about the checkpoint name --load.
    line.remarks.append(f"{option.given}: the same as --load {option.value} --finetune")
    return [
        Option(option.given, "load", option.values),
        *([] if line.last("finetune") else [Option(option.given, "finetune", [])]),
    ]


def _mock_data(line: CommandLine, option: Option) -> list[Option]:
    """Made-up data needs no tokenizer, only the size of its vocabulary."""
    tokenizer = line.last("tokenizer-type", "config", "yaml-cfg")
    if tokenizer is not None or line.last("vocab-size") is None:
        return [option]
    line.remarks.append(f"{option.given}: --tokenizer-type NullTokenizer, as none is given")
    return [option, Option(option.given, "tokenizer-type", ["NullTokenizer"])]


def _no_load_optim(line: CommandLine, option: Option) -> list[Option]:
    """It changes nothing with --finetune, or where nothing is loaded."""
    if line.last("finetune", "pretrained-checkpoint") is not None:
        line.ignore(option, WEIGHTS_ALONE)
        return []
    if line.last("load", "config", "yaml-cfg") is None:
        line.ignore(option, "there is no --load, so no optimizer to leave out")
        return []
    return [option]


def _sequence_parallel(line: CommandLine, option: Option) -> list[Option]:
    """It is turned off for one tensor-parallel rank, as in Megatron-LM."""
    size = line.last("tensor-model-parallel-size", "model-parallel-size")
    has_document = line.last("config", "yaml-cfg") is not None  # it may set the size
    if has_document or (size is not None and size.values != ["1"]):
        return [option]
    line.remarks.append(f"{option.given}: turned off, as --tensor-model-parallel-size is 1")
    return []


def _optimizer(line: CommandLine, option: Option) -> list[Option]:
    """`dist_muon` is Muon with its state shared out over the data-parallel ranks."""
    if option.values != ["dist_muon"]:
        return [option]
    sharded = Option(option.given, "use-distributed-optimizer", [])
    more = [] if line.last("use-distributed-optimizer") else [sharded]
    return [Option(option.given, "optimizer", ["muon"]), *more]


def _data_folder(line: CommandLine, option: Option) -> list[Option]:
    """Instruction data by the names of its data sets, each a folder with two files."""
    if answers_questions(line):
        return questions_file(line, option)
    named = line.last("data-path")
    if named is None:
        raise ConfigError(f"{option.given} is the folder of --data-path; give --data-path too")
    line.options = [o for o in line.options if o.name != "data-path"]
    folder = option.value.rstrip("/")

    def files(kind: str) -> list[str]:
        return [
            value if is_number(value) else f"{folder}/{value}/{value}_QA_{kind}.json"
            for value in named.values
        ]

    return [
        Option(option.given, "train-data-path", files("train")),
        Option(option.given, "valid-data-path", files("dev")),
        *([] if line.last("sft") else [Option(option.given, "sft", [])]),
    ]


def _retro_cyclic_train_iters(line: CommandLine, option: Option) -> list[Option]:
    """The length of a tuning. Megatron-LM puts it in place of --train-iters where there is a
    project, once its scheduler is made: the learning rate decays over --train-iters."""
    order = line.last("dataloader-type", *DOCUMENTS)
    if order is None or (order.name == "dataloader-type" and order.value != "cyclic"):
        line.ignore(option, "it only applies with --dataloader-type cyclic")
        return []
    # A tuning's project is among the ignored options if it came first.
    if line.last(*PROJECT, *DOCUMENTS) is None and NO_NEIGHBORS not in line.ignored:
        line.ignore(option, "it only applies with --retro-project-dir")
        return []
    if not _is_tuning(line):
        raise ConfigError(
            f"{option.given} is not supported: a table of neighbours is of the samples of the "
            "whole run; give its length as --train-iters, here and to faiss_query"
        )
    before = line.last(*LENGTH)
    line.options = [o for o in line.options if o.name not in LENGTH]
    line.remarks.append(f"{option.given}: the same as --train-iters {option.value}")
    length = Option(option.given, "train-iters", option.values)
    if before is None or line.last("lr-decay-iters", "lr-decay-samples", *DOCUMENTS) is not None:
        return [length]
    line.remarks.append(f"{before.given}: the same as --lr-decay-iters {before.value}")
    return [length, Option(before.given, "lr-decay-iters", before.values)]


def _retro_project_dir(line: CommandLine, option: Option) -> list[Option]:
    if not _is_tuning(line):
        return [option]
    line.ignore(option, NO_NEIGHBORS)
    return []


def _is_tuning(line: CommandLine) -> bool:
    """Whether the data is instruction data."""
    return line.last("data-folder", "sft") is not None


def _exit_signal(line: CommandLine, option: Option) -> list[Option]:
    for value in option.values:
        if (problem := exit_signal_problem(value)) is not None:
            raise ConfigError(f"{option.given} {value}: {problem}")
    return [option]


def exit_signal_problem(value: str) -> str | None:
    """Why a signal, given by name or number, does not stop a run; None if it does."""
    name = value.upper().rpartition(".")[2].removeprefix("SIG")
    handled = {text for one in STOPPING for text in (one.name.removeprefix("SIG"), str(one.value))}
    if name in handled:
        return None
    return (
        f"a run saves and stops at {', '.join(one.name for one in STOPPING)}; any other signal "
        "would end it with nothing saved; have the scheduler send one of these (Slurm: "
        "--signal=USR1@300) and leave the option out"
    )


RUN_RULES: dict[str, Rule] = {
    "logging-level": _logging_level,
    "ckpt-step": _ckpt_step,
    "pretrained-checkpoint": _pretrained_checkpoint,
    "mock-data": _mock_data,
    "no-load-optim": _no_load_optim,
    "sequence-parallel": _sequence_parallel,
    "optimizer": _optimizer,
    "exit-signal": _exit_signal,
    "data-folder": _data_folder,
    "retro-cyclic-train-iters": _retro_cyclic_train_iters,
    "retro-project-dir": _retro_project_dir,
    "retro-workdir": _retro_project_dir,
}
