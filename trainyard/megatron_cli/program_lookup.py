"""Finds a program of Megatron-LM by its path as people have it, and prints all of them. Standard
library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainyard.config import nearest
from trainyard.errors import ConfigError
from trainyard.megatron_cli.options import split_options
from trainyard.megatron_cli.programs import PROGRAMS, Program


def find_program(given: str) -> Program:
    """The program of a path: whole, below any folder, without its folder, or as a module.

    Raises ConfigError with the nearest names for another."""
    parts = given.removesuffix(".py").removesuffix("/__main__").split("/")
    if len(parts) == 1:  # a module, as python -m takes it
        parts = given.removesuffix(".py").split(".")
    matches = [(_common_end(program, parts), program) for program in PROGRAMS]
    longest = max(length for length, _ in matches)
    found = [program for length, program in matches if length == longest > 0]
    if not found:
        names = dict.fromkeys(program.path.rpartition("/")[2] for program in PROGRAMS)
        near = nearest(parts[-1] + ".py", tuple(names), most=3)
    elif longest == len(parts) or len(found) == 1:
        return found[0]
    else:
        whole = [program for program in found if len(program.path.split("/")) == longest]
        if whole:
            return whole[0]
        near = [program.path for program in found]  # another program of a name such as train.py
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all"
    raise ConfigError(f"{given} is not a program of Megatron-LM that trainyard knows: {hint}")


def for_task(program: Program, arguments: Sequence[str]) -> Program:
    """The program with the stage of the task that its command line names."""
    named = [one.value for one in split_options(arguments)[1] if one.name == "task" and one.values]
    stage = program.by_task.get(named[-1], program.stage) if named else program.stage
    return replace(program, stage=stage)


def _common_end(program: Program, parts: Sequence[str]) -> int:
    """How many parts of the paths agree, from the end."""
    own = program.path.removesuffix(".py").split("/")
    count = 0
    for a, b in zip(reversed(own), reversed(parts), strict=False):
        if a != b:
            break
        count += 1
    return count


def table() -> str:
    """All programs: the stage of each and what the name stands for; then those without a stage, by
    the answer."""
    lines = []
    answers: dict[str, list[str]] = {}
    width = max(len(program.path) for program in PROGRAMS if program.stage)
    for program in PROGRAMS:
        if not program.stage:
            answers.setdefault(program.answer, []).append(program.path)
            continue
        kind = program.tokenizer_type and f"--tokenizer-type {program.tokenizer_type}"
        words = filter(None, (f"stages.{program.stage}", *program.implies, kind))
        lines.append(f"{program.path:{width}}  {' '.join(words)}")
        for stage in dict.fromkeys(program.by_task.values()):
            tasks = ", ".join(name for name, other in program.by_task.items() if other == stage)
            lines.append(f"{'':{width}}  stages.{stage} for --task {tasks}")
    lines += ["", "No stage does the work of these:"]
    for answer, paths in answers.items():
        lines += ["", *paths, f"    {answer}"]
    return "\n".join(lines)
