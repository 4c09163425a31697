"""Rules for flags of Megatron-LM's programs that generate text. Each returns the options that stand
for the flag."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.megatron_cli.command_line import CommandLine, Rule
from trainyard.megatron_cli.options import Option, is_number

GRAPHS = "inference-dynamic-batching-num-cuda-graphs"

DEFAULT_GRAPHS = "16"
"""Megatron-LM's default, of which it makes fewer or more with -1."""


def _cuda_graph_impl(line: CommandLine, option: Option) -> list[Option]:
    """It is an option of batches; another says how many graphs the dynamic engine records."""
    engine = line.last("engine-type")
    if engine is None or engine.value != "dynamic":
        return [option]
    line.ignore(option, f"graphs are recorded by --{GRAPHS}")
    return []


def _num_cuda_graphs(line: CommandLine, option: Option) -> list[Option]:
    if option.values != ["-1"]:
        return [option]
    line.remarks.append(f"{option.given} -1: {DEFAULT_GRAPHS}")
    return [Option(option.given, option.name, [DEFAULT_GRAPHS])]


def _requests_per_second(line: CommandLine, option: Option) -> list[Option]:
    """A rate that is not above 0 sends all requests at once, as no rate does here."""
    if not is_number(option.value) or float(option.value) > 0:
        return [option]
    line.ignore(option, "without a rate all requests are sent at once")
    return []


def _num_samples(line: CommandLine, option: Option) -> list[Option]:
    """A script that cannot count the lines of its prompts leaves the number out."""
    if option.values or line.last("sample-input-file", "prompt-file") is None:
        return [option]
    line.remarks.append(f"{option.given}: no number, so all prompts of the file are continued")
    return []


def _text_file(line: CommandLine, option: Option) -> list[Option]:
    """The file of the texts: a folder here, like every output."""
    file = "predictions.jsonl" if answers_questions(line) else "generations.jsonl"
    line.remarks.append(f"{option.given} {option.value}: a folder, with the texts in {file}")
    return [Option(option.given, "output-dir", option.values)]


def answers_questions(line: CommandLine) -> bool:
    """Whether the command is stages.evaluate."""
    return line.vocabulary.ours("valid-data") is not None


def _greedy(line: CommandLine, option: Option) -> list[Option]:
    """The likeliest token, whatever else is given would choose another."""
    for name, value in (("top-k", "1"), ("top-p", "0")):
        other = line.last(name)
        if other is None or not is_number(other.value):
            continue
        if float(other.value) != float(value):
            raise ConfigError(
                f"{option.given} takes the likeliest token, and {other.given} {other.value} draws "
                "one; give one of them"
            )
    return [] if line.last("top-k") else [Option(option.given, "top-k", ["1"])]


def _top_p(line: CommandLine, option: Option) -> list[Option]:
    """Without a number of tokens, it chooses among all, as in Megatron-LM; ours is 1."""
    if line.last("top-k", "greedy", "config") or not is_number(option.value):
        return [option]
    return [option, *([Option("--top-k", "top-k", ["0"])] if float(option.value) else [])]


def questions_file(line: CommandLine, option: Option) -> list[Option]:
    """--data-folder and --split as the file of a task's questions, as retro_generate.sh names it:
    FOLDER/TASK/SPLIT.json."""
    folder, split = line.last("data-folder"), line.last("split")
    if folder is not None and split is not None:
        task = line.last("task")
        if task is None:
            raise ConfigError(f"{folder.given} has a folder for each task; give --task too")
        path = f"{folder.value.rstrip('/')}/{task.value}/{split.value}.json"
        line.remarks.append(f"{folder.given} and {split.given}: the questions of {path}")
        return [Option(option.given, "valid-data", [path])]
    if any(_is_of_pair(one) for one in line.options if one is not option):
        return []  # the other one has become the file
    if split is None:
        raise ConfigError(
            f"{option.given} needs --split: the questions are in FOLDER/TASK/SPLIT.json; or name "
            "the file with --valid-data"
        )
    line.ignore(option, "it only applies with --data-folder; --valid-data names whole files")
    return []


def _is_of_pair(option: Option) -> bool:
    return option.given.lstrip("-").replace("_", "-") in ("data-folder", "split")


TEXT_RULES: dict[str, Rule] = {
    "cuda-graph-impl": _cuda_graph_impl,
    GRAPHS: _num_cuda_graphs,
    "num-samples": _num_samples,
    "genfile": _text_file,
    "sample-output-file": _text_file,
    "output-file": _text_file,
    "incoming-requests-per-sec": _requests_per_second,
    "greedy": _greedy,
    "top-p": _top_p,
    "split": questions_file,
}
