"""Runs the programs of Megatron-LM under their own names.

    python -m stages.megatron PROGRAM ARGS...        such as tools/preprocess_data.py --input ...
    torchrun ... -m stages.megatron PROGRAM ARGS...
    python -m stages.megatron --help                 the table of programs

It finds the stage that does the work of the program (`trainyard.megatron_cli.programs`), adds what
the program's name stands for, and runs the stage as if it had been started itself."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Sequence

from stages.runtime.failure import report_failure
from stages.runtime.process_exit import reader_is_gone
from trainyard import logging as our_logging
from trainyard.errors import ConfigError, TrainyardError
from trainyard.megatron_cli.implied import implied
from trainyard.megatron_cli.options import split_options
from trainyard.megatron_cli.program_lookup import find_program, for_task, table
from trainyard.megatron_cli.programs import Program

log = logging.getLogger("stages.megatron")

HELP = """usage: python -m stages.megatron PROGRAM ARGS...

Run the stage that does the work of a program of Megatron-LM. PROGRAM is its path, as in a command
line or a guide. These programs have a stage:
"""


def main(words: Sequence[str]) -> int:
    """Run the stage of a program, which ends the process with its exit status. Returns one only if
    no stage runs."""
    our_logging.configure()
    try:
        if not words:
            raise ConfigError("no program is named, such as pretrain_gpt.py; --help lists all")
        if words[0] in ("-h", "--help"):
            print(HELP, table(), sep="\n")
            return 0
        program = for_task(find_program(words[0]), words[1:])
        arguments = stage_arguments(program, words[1:])
    except BrokenPipeError:
        return reader_is_gone()
    except TrainyardError as error:
        return report_failure("megatron", error, "--debug" in words)
    sys.argv = [sys.argv[0], *arguments]
    runpy.run_module(f"stages.{program.stage}", run_name="__main__", alter_sys=True)
    raise AssertionError(f"stages.{program.stage} returned")


def stage_arguments(program: Program, words: Sequence[str]) -> list[str]:
    """The command line of the program's stage. Raises ConfigError for a program without one."""
    if not program.stage:
        raise ConfigError(f"{program.path}: {program.answer}")
    arguments, added = implied(program, words, os.environ)
    if program.path == "pretrain_retro.py":
        more = of_project(arguments)
        arguments, added = [*arguments, *more], [*added, *more]
    if added and os.environ.get("RANK", "0") == "0":
        log.info("%s: stages.%s with %s", program.path, program.stage, " ".join(added))
    return arguments


def of_project(arguments: Sequence[str]) -> list[str]:
    """The options of a training with neighbours that its project decides, whatever the command line
    has, as in Megatron-LM; of data and length only those that it lacks.

    Raises ArtifactError or ConfigError for a project that cannot be read."""
    options = {option.name: option for option in split_options(arguments)[1]}
    folder = options.get("retro-project-dir") or options.get("retro-workdir")
    if folder is None or "help" in options:
        return []
    from trainyard.retrieval.project import read_project  # takes a moment, for this program alone

    project = read_project(folder.value)
    tokenizer, data, config = project.gpt_tokenizer(), project.data(), project.config
    values: dict[str, object] = {
        "seq-length": config.retro_gpt_seq_length,
        "retro-chunk-length": config.retro_gpt_chunk_length,
        "global-batch-size": config.retro_gpt_global_batch_size,
        "eval-interval": config.retro_gpt_eval_interval,
        "eval-iters": config.retro_gpt_eval_iters,
        "seed": config.retro_gpt_seed,
        "tokenizer-type": tokenizer.tokenizer_type,
        "tokenizer-model": tokenizer.tokenizer_model,
        "vocab-file": tokenizer.vocab_file,
        "merge-file": tokenizer.merge_file,
    }
    lacking: dict[str, object] = {"split": data.split, "data-path": data.data_path}
    if "train-iters" not in options:
        lacking["train-samples"] = str(config.retro_gpt_train_samples)
    values |= {name: value for name, value in lacking.items() if name not in options}
    found: list[str] = []
    for name, value in values.items():
        if value is not None:
            found += [f"--{name}", *(value if isinstance(value, tuple) else (str(value),))]
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
