"""Rules for flags of Megatron-LM's programs that generate text. Each returns the options that stand
for the flag."""

from __future__ import annotations

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
    line.remarks.append(
        f"{option.given} {option.value}: a folder, with the texts in generations.jsonl"
    )
    return [Option(option.given, "output-dir", option.values)]


TEXT_RULES: dict[str, Rule] = {
    "cuda-graph-impl": _cuda_graph_impl,
    GRAPHS: _num_cuda_graphs,
    "num-samples": _num_samples,
    "genfile": _text_file,
    "sample-output-file": _text_file,
    "output-file": _text_file,
    "incoming-requests-per-sec": _requests_per_second,
}
