"""A command line as Megatron-LM, and the guides around it, spell it, in our spelling.

Options that are ours under another name are renamed, those without effect are left out and told of,
those that are not there are answered with what to do. What nobody knows is answered with the
nearest name."""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trainyard.errors import ConfigError
from trainyard.megatron_cli.options import Option, split_options
from trainyard.megatron_cli.spellings import VALUES, Vocabulary, is_harmless, vocabulary

LEVELS = {"10": "debug", "20": "info", "30": "warning", "40": "error"}
"""Python's numbers of the levels that --log-level knows."""

STOPPING = (signals.SIGTERM, signals.SIGINT, signals.SIGUSR1)
"""What a training listens to, whatever --exit-signal says (stages.runtime.context)."""

NO_EFFECT = "taken, without effect"

WEIGHTS_ALONE = "--finetune takes the weights alone"


@dataclass(frozen=True, slots=True)
class Understood:
    """A command in our spelling."""

    arguments: list[str]
    remarks: list[str] = field(default_factory=list)
    """What is to be said about it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that it sets, for ranks to find each other."""


def understand(
    arguments: Sequence[str],
    config_class: type,
    environ: Mapping[str, str],
    more: Sequence[str] = (),
) -> Understood:
    """The command in our spelling; ConfigError for what is not there, with what to do instead.

    environ: tells what a launcher such as torchrun has set. more: flags besides those of the
    configuration."""
    return _Command(arguments, vocabulary(config_class, tuple(more)), environ).understood()


class _Command:
    def __init__(
        self, arguments: Sequence[str], vocabulary: Vocabulary, environ: Mapping[str, str]
    ) -> None:
        self.first, options = split_options(arguments)
        self.vocabulary, self.environ = vocabulary, environ
        self.remarks: list[str] = []
        self.environment: dict[str, str] = {}
        self._ineffective: dict[str, list[str]] = {}
        self.options = options

    def understood(self) -> Understood:
        if any(option.name == "help" for option in self.options):
            return Understood([*self.first, "--help"])
        self._apply_rules()
        kept = [kept for option in self.options if (kept := self._translated(option)) is not None]
        self._refuse_two_names(kept)
        effects = [
            f"{', '.join(flags)}: {NO_EFFECT}: {reason}"
            for reason, flags in self._ineffective.items()
        ]
        tokens = [token for option in kept for token in option.tokens()]
        return Understood([*self.first, *tokens], self.remarks + effects, self.environment)

    def _translated(self, option: Option) -> Option | None:
        meaning = self.vocabulary.meaning(option.name)
        if meaning.kind == "ours":
            values = [VALUES.get((meaning.name, value), value) for value in option.values]
            return Option(option.given, meaning.name, values)
        if meaning.kind == "absent" and is_harmless(option.name, option.values):
            return None
        if meaning.kind == "accepted":
            self._ineffective.setdefault(meaning.reason, []).append(option.given)
            return None
        if meaning.kind == "absent":
            raise ConfigError(f"{option.given} is not there: {meaning.reason}")
        raise ConfigError(f"{option.given} is not an option: {meaning.reason}")

    def _refuse_two_names(self, options: Sequence[Option]) -> None:
        """The same name twice is no matter, the last counts; two names of one option are."""
        names: dict[str, Option] = {}
        for option in options:
            before = names.setdefault(option.name, option)
            if _spelt(before) != _spelt(option):
                raise ConfigError(
                    f"{before.given} and {option.given} are names of one option; give one"
                )

    # --- options that mean more than another name -----------------------------------------------

    def _apply_rules(self) -> None:
        rules: dict[str, Callable[[Option], list[Option]]] = {
            "use-rotary-position-embeddings": self._rotary,
            "no-position-embedding": self._no_position_embedding,
            "rope-type": self._rope_type,
            "logging-level": self._logging_level,
            "ckpt-step": self._ckpt_step,
            "pretrained-checkpoint": self._pretrained_checkpoint,
            "world-size": self._world_size,
            "init-method": self._init_method,
            "local-rank": self._local_rank,
            "epochs": self._epochs,
            "mock-data": self._mock_data,
            "no-load-optim": self._no_load_optim,
            "sequence-parallel": self._sequence_parallel,
            "exit-signal": self._exit_signal,
        }
        for option in list(self.options):
            rule = rules.get(option.name)
            if rule is not None:
                instead = rule(option)
                at = next(i for i, o in enumerate(self.options) if o is option)
                self.options[at : at + 1] = instead

    def _last(self, *names: str) -> Option | None:
        return next((o for o in reversed(self.options) if o.name in names), None)

    def _rotary(self, option: Option) -> list[Option]:
        given = self._last("position-embedding-type")
        if given is None:
            return [Option(option.given, "position-embedding-type", ["rope"])]
        if given.value != "rope":
            raise ConfigError(
                f"{option.given} means --position-embedding-type rope, which is {given.value}; "
                "leave one of them out"
            )
        return []

    def _no_position_embedding(self, option: Option) -> list[Option]:
        if self._last("position-embedding-type", "use-rotary-position-embeddings") is None:
            raise ConfigError(
                f"{option.given} says what there is not: give --position-embedding-type rope, or "
                "none"
            )
        return []

    def _rope_type(self, option: Option) -> list[Option]:
        if option.value != "rope":
            raise ConfigError(
                f"{option.given} {option.value}: give --position-embedding-type {option.value}"
            )
        return []

    def _logging_level(self, option: Option) -> list[Option]:
        if option.value not in LEVELS:
            levels = ", ".join(f"{level} ({number})" for number, level in LEVELS.items())
            raise ConfigError(f"{option.given} {option.value}: give --log-level, one of {levels}")
        return [Option(option.given, "log-level", [LEVELS[option.value]])]

    def _ckpt_step(self, option: Option) -> list[Option]:
        load = self._last("load")
        if load is None:
            raise ConfigError(f"{option.given} is a step of --load, which is not given")
        load.values = [f"{load.value.rstrip('/')}/iter_{option.number:07d}"]
        return []

    def _pretrained_checkpoint(self, option: Option) -> list[Option]:
        """Weights to begin with; a run that has steps of its own goes on from these."""
        load, save = self._last("load"), self._last("save")
        if load is not None and (save is None or load.value != save.value):
            raise ConfigError(
                f"{option.given} and --load are two checkpoints to begin with; give --load with "
                "--finetune for the weights alone, or without to go on"
            )
        if load is not None:
            self.options = [o for o in self.options if o.name != "load"]
        return [
            Option(option.given, "load", option.values),
            *([] if self._last("finetune") else [Option(option.given, "finetune", [])]),
        ]

    def _mock_data(self, option: Option) -> list[Option]:
        """Made-up data needs no tokenizer, only the size of its vocabulary."""
        tokenizer = self._last("tokenizer-type", "config", "yaml-cfg")
        if tokenizer is not None or self._last("vocab-size") is None:
            return [option]
        self.remarks.append(f"{option.given}: --tokenizer-type NullTokenizer, as none is given")
        return [option, Option(option.given, "tokenizer-type", ["NullTokenizer"])]

    def _no_load_optim(self, option: Option) -> list[Option]:
        """Beside --finetune it says what holds anyway; alone it is answered (absent.py)."""
        if self._last("finetune", "pretrained-checkpoint") is None:
            return [option]
        self._ineffective.setdefault(WEIGHTS_ALONE, []).append(option.given)
        return []

    def _sequence_parallel(self, option: Option) -> list[Option]:
        """On one tensor-parallel rank it is turned off, as in Megatron-LM."""
        size = self._last("tensor-model-parallel-size", "model-parallel-size")
        told_elsewhere = self._last("config", "yaml-cfg") is not None
        if told_elsewhere or (size is not None and size.values != ["1"]):
            return [option]
        self.remarks.append(f"{option.given}: turned off, as --tensor-model-parallel-size is 1")
        return []

    def _epochs(self, option: Option) -> list[Option]:
        size = self._last("dataset-size")
        answer = epochs_answer(option.number, None if size is None else size.number)
        raise ConfigError(f"{option.given} {option.value}: {answer}")

    # --- ranks ------------------------------------------------------------------------------

    def _exit_signal(self, option: Option) -> list[Option]:
        for value in option.values:
            if (problem := exit_signal_problem(value)) is not None:
                raise ConfigError(f"{option.given} {value}: {problem}")
        return [option]

    def _world_size(self, option: Option) -> list[Option]:
        size, started = option.number, self.environ.get("WORLD_SIZE")
        if "RANK" in self.environ:
            if started is not None and started != str(size):
                raise ConfigError(
                    f"{option.given} {size}: the launcher started {started} ranks (WORLD_SIZE); "
                    "leave the option out"
                )
            return []
        here = self._last("nproc-per-node")
        if here is None:
            return [Option(option.given, "nproc-per-node", [str(size)])]
        if here.number != size:
            raise ConfigError(
                f"{option.given} {size} and {here.given} {here.value}: this command starts the "
                "ranks of one machine; on several, start torchrun --nnodes ... --nproc-per-node "
                f"{here.value} -m stages.pretrain ... on each"
            )
        return []

    def _init_method(self, option: Option) -> list[Option]:
        address = urlsplit(option.value)
        if address.scheme == "env":
            return []
        try:
            host, port = address.hostname, address.port
        except ValueError:
            host = port = None
        if address.scheme != "tcp" or host is None or port is None:
            raise ConfigError(
                f"{option.given} {option.value!r} must be tcp://HOST:PORT; torchrun gives "
                "--master-addr and --master-port to the ranks that it starts"
            )
        if "RANK" not in self.environ:
            self.remarks.append(
                f"{option.given}: {NO_EFFECT}: this command starts all ranks itself, and they meet "
                "at a free port"
            )
            return []
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", str(port))):
            held = self.environ.get(name)
            if held is None:
                self.environment[name] = value
            elif held != value:
                self.remarks.append(f"{option.given}: the launcher's {name}={held} holds")
        return []

    def _local_rank(self, option: Option) -> list[Option]:
        if "RANK" in self.environ and "LOCAL_RANK" not in self.environ:
            self.environment["LOCAL_RANK"] = option.value
        else:
            whose = "LOCAL_RANK holds" if "RANK" in self.environ else "ranks are started here"
            self.remarks.append(f"{option.given}: {NO_EFFECT}: {whose}")
        return []


def exit_signal_problem(value: str) -> str | None:
    """Why a run cannot be asked to stop by a signal, given by name or number; None where it can."""
    name = value.upper().rpartition(".")[2].removeprefix("SIG")
    heard = {text for one in STOPPING for text in (one.name.removeprefix("SIG"), str(one.value))}
    if name in heard:
        return None
    return (
        f"a run saves and stops at {', '.join(one.name for one in STOPPING)}, and another signal "
        "would end it with nothing saved; have the scheduler send one of these (Slurm: "
        "--signal=USR1@300) and leave the option out"
    )


def epochs_answer(epochs: int, dataset_size: int | None) -> str:
    """How a number of epochs is given here."""
    if dataset_size is not None:
        return (
            "a run is measured in samples or steps; give --train-samples "
            f"{epochs * dataset_size}, which is {epochs} x --dataset-size; lengths of the schedule "
            "are then samples too (--lr-warmup-samples, --lr-decay-samples)"
        )
    return (
        f"a run is measured in samples or steps; give --train-samples {epochs} x ((tokens of the "
        "training split - 1) // --seq-length); later epochs are shuffled anew, and lengths of the "
        "schedule are then samples too (--lr-warmup-samples, --lr-decay-samples)"
    )


def _spelt(option: Option) -> str:
    return option.given.lstrip("-").replace("_", "-").removeprefix("no-").removeprefix("disable-")
