"""What the name of a program implies, as flags for its stage. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainyard.errors import ConfigError
from trainyard.megatron_cli.options import Option, split_options, unquoted
from trainyard.megatron_cli.programs import EXAMPLE, FINETUNE_GPT, Program

DOCUMENTS = ("config", "yaml-cfg")
"""Options that bring a tokenizer of their own."""

TRAINS = ("pretrain", "finetune")
FP8_FORMATS = {"fp8-format", "fp8"}
"""In a command that trains, these stand for Megatron-LM's recipe too; ours is another."""

DEVICES = ("world-size", "data-parallel-size", "nproc-per-node")
"""Options that say to a plan how many devices there are."""

FILES = ("tokenizer-model", "vocab-file", "vocab", "merge-file")
"""Without them --use-checkpoint-args brings the checkpoint's."""

OTHER = {"out-seq-length": "num-tokens-to-generate", "top-k": "greedy"}
"""The other spelling of a flag that a program implies."""

OF_ANOTHER = {"valid-data-split": "valid-data-path"}
"""The flag without which one that a program implies says nothing."""

EXAMPLE_DEFAULTS: dict[str, str] = {
    "num-layers": "4",
    "hidden-size": "256",
    "num-attention-heads": "8",
    "ffn-hidden-size": "1024",
    "vocab-size": "10000",
    "seq-length": "256",
    "micro-batch-size": "16",
    "dataset-size": "10000",
    "lr": "0.0001",
    "lr-warmup-iters": "100",
    "log-interval": "10",
    "eval-iters": "0",
}
"""The documented defaults of `megatron_core_training_example.py` that are not ours; it measures no
validation loss."""

EXAMPLE_STEPS, EXAMPLE_EPOCHS = 1000, 3

SAME = {
    "batch-size": "micro-batch-size",
    "train-steps": "train-iters",
    "warmup-steps": "lr-warmup-iters",
    "wandb-run-name": "wandb-exp-name",
}
"""Its spellings."""


def implied(
    program: Program, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The arguments of the stage, and which of them the program's name implies.

    environ: the environment, for the number of ranks that a launcher has started."""
    if program.path == EXAMPLE:
        return _of_example(arguments, environ)
    arguments = _renamed(program, arguments)
    given = {option.name for option in split_options(arguments)[1]}
    added: list[str] = []
    for name, value in zip(program.implies[::2], program.implies[1::2], strict=True):
        of_another = OF_ANOTHER.get(name[2:])
        if of_another is not None and of_another not in given:
            continue
        if not given & {name[2:], OTHER.get(name[2:], "")}:
            added += [name, value]
    if program.tokenizer_type and not _brings_tokenizer(given):
        added += ["--tokenizer-type", program.tokenizer_type]
    if program.stage in TRAINS and given & FP8_FORMATS and not given & {"fp8-recipe", *DOCUMENTS}:
        added += ["--fp8-recipe", "delayed"]
    ranks = environ.get("WORLD_SIZE", "1")
    if program.stage == "plan" and ranks != "1" and not given & {*DEVICES}:
        added += ["--world-size", ranks]  # all that Megatron-LM's program knows about devices
    return [*arguments, *added], added


def _renamed(program: Program, arguments: Sequence[str]) -> list[str]:
    """The arguments with the flags that mean something else to this program."""
    if not program.renames:
        return list(arguments)
    first, options = split_options(arguments)
    given = {option.name: option.given for option in options}
    for option in options:
        if program.path == FINETUNE_GPT and option.name == "split":
            _check_split(option)
        new = program.renames.get(option.name, option.name)
        if new != option.name and new in given:
            raise ConfigError(f"{option.given} is {given[new]} to {program.path}; give one of them")
        option.name = new
    return [*first, *(token for option in options for token in option.tokens())]


def _check_split(option: Option) -> None:
    """Refuse a split that leaves documents of --data-path out: validation has --data-path2."""
    rest = [part for part in unquoted(option.value).replace(" ", "").split(",")[1:] if part]
    if any(part.strip("0.") for part in rest):
        raise ConfigError(
            f"{option.given} {option.value}: finetune_gpt.py trains on all documents of "
            "--data-path and validates on --data-path2; give --split 100,0,0"
        )


def _brings_tokenizer(given: set[str]) -> bool:
    """Whether the command names a tokenizer, or needs none as it makes its data up."""
    if "use-checkpoint-args" in given and not given & {*FILES}:
        return True
    return bool(given & {"tokenizer-type", *DOCUMENTS}) or {"mock-data", "vocab-size"} <= given


# --- the training example of guides --------------------------------------------------------------


def _of_example(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Its defaults, made-up data, and the length that --epochs and --train-steps have together:
    whichever ends first."""
    first, options = split_options(arguments)
    kept = _with_wandb([o for o in options if o.name != "epochs"])
    values = {SAME.get(option.name, option.name): option for option in options}
    added = []
    for name, value in EXAMPLE_DEFAULTS.items():
        if name not in values:
            added += [f"--{name}", value]
    if "data-path" not in values:
        added += [] if "mock-data" in values else ["--mock-data"]
    if "train-samples" not in values:
        kept = [o for o in kept if SAME.get(o.name, o.name) != "train-iters"]
        steps, warmup = _steps(values, environ), _number(values, "lr-warmup-iters", 100)
        added += ["--train-iters", str(steps)]
        if steps <= warmup and "lr-decay-iters" not in values:
            added += ["--lr-decay-iters", str(warmup + 1)]  # the rate rises to the end, as there
    tokens = [token for option in kept for token in option.tokens()]
    return [*first, *tokens, *added], added


def _steps(values: Mapping[str, Option], environ: Mapping[str, str]) -> int:
    """Steps until --train-steps, or the end of the last epoch: each rank has its share of the
    samples, and a last batch that is not full is a step too."""

    def number(name: str, default: int) -> int:
        return _number(values, name, default)

    ranks = int(environ.get("WORLD_SIZE", "0")) or number("world-size", 0)
    ranks = ranks or number("nproc-per-node", 1)
    of_model = number("tensor-model-parallel-size", 1) * number("pipeline-model-parallel-size", 1)
    replicas = max(1, ranks // of_model)
    share = math.ceil(number("dataset-size", int(EXAMPLE_DEFAULTS["dataset-size"])) / replicas)
    batch = number("micro-batch-size", int(EXAMPLE_DEFAULTS["micro-batch-size"]))
    epochs = number("epochs", EXAMPLE_EPOCHS)
    return min(number("train-iters", EXAMPLE_STEPS), epochs * math.ceil(share / batch))


def _number(values: Mapping[str, Option], name: str, default: int) -> int:
    return values[name].number if name in values else default


def _with_wandb(options: Sequence[Option]) -> list[Option]:
    """Its options of Weights & Biases: a switch turns it on, and a project has a default."""
    names = {option.name for option in options}
    if "wandb" not in names:
        return [option for option in options if not option.name.startswith("wandb-")]
    kept = [option for option in options if option.name not in ("wandb", "wandb-group")]
    for option in kept:
        option.name = SAME.get(option.name, option.name)
    if "wandb-project" not in names:
        kept.append(Option("--wandb", "wandb-project", ["megatron-core"]))
    return kept
