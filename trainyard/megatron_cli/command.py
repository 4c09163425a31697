"""Translates a command line in Megatron-LM's spelling, or that of guides to it, into ours.

An option that we have under another name is renamed. An option without effect is dropped and
reported. An unsupported option raises an error that says what to do instead; an unknown one, an
error that names the nearest."""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trainyard.errors import ConfigError
from trainyard.megatron_cli.options import Option, is_number, split_options, unquoted
from trainyard.megatron_cli.spellings import Vocabulary

LEVELS = {"10": "debug", "20": "info", "30": "warning", "40": "error"}
"""The levels of --log-level, by Python's numbers."""

STOPPING = (signals.SIGTERM, signals.SIGINT, signals.SIGUSR1)
"""Signals that make a run save and stop, whatever --exit-signal says (stages.runtime.context)."""

NO_EFFECT = "ignored"

EXPECT = "expect"
"""The option of a command with a checkpoint that takes the options that its model must have."""

HYBRID_SPEC = "mamba_stack_spec"
"""Last value of the --spec of Megatron-LM's hybrids, after its module."""

TEXTS = ("prompts",)
"""Options whose values are texts, in which quotes mean themselves."""

WEIGHTS_ALONE = "--finetune loads only the weights anyway"


@dataclass(frozen=True, slots=True)
class Understood:
    """A command in our spelling."""

    arguments: list[str]
    remarks: list[str] = field(default_factory=list)
    """Lines to log about it, such as which options are ignored."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that it sets, for ranks to find each other."""


def understand(
    arguments: Sequence[str], vocabulary: Vocabulary, environ: Mapping[str, str]
) -> Understood:
    """The command in our spelling; ConfigError for an unsupported option, with what to do instead.

    environ: the environment, for what a launcher such as torchrun has set."""
    return _Command(arguments, vocabulary, environ).understood()


class _Command:
    def __init__(
        self, arguments: Sequence[str], vocabulary: Vocabulary, environ: Mapping[str, str]
    ) -> None:
        self.first, options = split_options(arguments)
        self.vocabulary, self.environ = vocabulary, environ
        self.remarks: list[str] = []
        self.environment: dict[str, str] = {}
        self._ineffective: dict[str, list[str]] = {}
        self._checked: dict[str, str] = {}
        self.options = options

    def understood(self) -> Understood:
        if any(option.name == "help" for option in self.options):
            return Understood([*self.first, "--help"])
        self._apply_rules()
        kept = [kept for option in self.options if (kept := self._translated(option)) is not None]
        self._refuse_two_names(kept)
        if self._checked:
            kept.append(
                Option(f"--{EXPECT}", EXPECT, [f"{k}={v}" for k, v in self._checked.items()])
            )
        effects = [
            f"{', '.join(flags)}: {NO_EFFECT}: {reason}"
            for reason, flags in self._ineffective.items()
        ]
        tokens = [token for option in kept for token in option.tokens()]
        return Understood([*self.first, *tokens], self.remarks + effects, self.environment)

    def _translated(self, option: Option) -> Option | None:
        meaning = self.vocabulary.meaning(option.name)
        if meaning.kind == "ours":
            return Option(option.given, meaning.name, self._values(meaning.name, option))
        if meaning.kind == "checked":
            self._check_later(meaning.name, self._values(meaning.name, option))
            return None
        if meaning.kind == "absent" and self.vocabulary.is_harmless(option.name, option.values):
            return None
        if meaning.kind == "accepted":
            self._ineffective.setdefault(meaning.reason, []).append(option.given)
            return None
        if meaning.kind == "absent":
            raise ConfigError(f"{option.given} is not supported: {meaning.reason}")
        raise ConfigError(f"{option.given} is not an option: {meaning.reason}")

    def _values(self, name: str, option: Option) -> list[str]:
        """The values in our spelling, without the quotes that a script left around them."""
        found = []
        for value in option.values:
            if (refusal := self.vocabulary.refusal(name, value)) is not None:
                raise ConfigError(f"{option.given} {value}: {refusal}")
            bare = value if name in TEXTS else unquoted(value)
            found.append(self.vocabulary.value(name, bare))
        return found

    def _check_later(self, name: str, values: Sequence[str]) -> None:
        """Keep an option of the model, to be compared with that of the checkpoint."""
        positive = name.removeprefix("no-")
        words = values or ["true" if name == positive else "false"]
        self._checked[positive.replace("-", "_")] = " ".join(words)

    def _refuse_two_names(self, options: Sequence[Option]) -> None:
        """Refuse two names of one option. One name may repeat: its last value counts."""
        names: dict[str, Option] = {}
        for option in options:
            before = names.setdefault(option.name, option)
            if _spelt(before) != _spelt(option):
                raise ConfigError(
                    f"{before.given} and {option.given} are names of one option; give one"
                )

    # --- options that are more than another spelling ---------------------------------------------

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
            "mock-data": self._mock_data,
            "no-load-optim": self._no_load_optim,
            "sequence-parallel": self._sequence_parallel,
            "optimizer": self._optimizer,
            "exit-signal": self._exit_signal,
            "retro-add-retriever": self._retro_add_retriever,
            "data-folder": self._data_folder,
            "spec": self._spec,
            "hybrid-layer-pattern": self._hybrid_pattern,
            "hybrid-override-pattern": self._hybrid_pattern,
        }
        for option in list(self.options):
            rule = rules.get(option.name)
            if rule is not None and option.name in self.vocabulary.rules:
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
                f"{option.given} means --position-embedding-type rope, but "
                f"--position-embedding-type is {given.value}; leave one of them out"
            )
        return []

    def _no_position_embedding(self, option: Option) -> list[Option]:
        if self._last("position-embedding-type", "use-rotary-position-embeddings") is None:
            raise ConfigError(
                f"{option.given} does not say which positions to use instead: give "
                "--position-embedding-type rope, or none"
            )
        return []

    def _rope_type(self, option: Option) -> list[Option]:
        """To latents rope means YaRN, which without a stretch is plain rope."""
        if self._last("multi-latent-attention") is not None:
            stretch = self._last("rotary-scaling-factor", "yarn-rotary-scaling-factor")
            if option.value == "rope" and stretch is not None and float(stretch.value) != 1.0:
                raise ConfigError(
                    f"{option.given} rope does not stretch, and {stretch.given} is "
                    f"{stretch.value}; leave one of them out"
                )
            return []
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
            raise ConfigError(f"{option.given} is a step of --load; give --load too")
        load.values = [f"{load.value.rstrip('/')}/iter_{option.number:07d}"]
        return []

    def _pretrained_checkpoint(self, option: Option) -> list[Option]:
        """Initial weights. A run that has saved steps of its own resumes from those instead."""
        load, save = self._last("load"), self._last("save")
        if load is not None and (save is None or load.value != save.value):
            raise ConfigError(
                f"{option.given} and --load name two checkpoints to begin with; give only --load, "
                "with --finetune for its weights alone, or without to resume"
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
        """With --finetune it changes nothing; alone it is an error (absent.py)."""
        if self._last("finetune", "pretrained-checkpoint") is None:
            return [option]
        self._ineffective.setdefault(WEIGHTS_ALONE, []).append(option.given)
        return []

    def _sequence_parallel(self, option: Option) -> list[Option]:
        """It is turned off for one tensor-parallel rank, as in Megatron-LM."""
        size = self._last("tensor-model-parallel-size", "model-parallel-size")
        has_document = self._last("config", "yaml-cfg") is not None  # it may set the size
        if has_document or (size is not None and size.values != ["1"]):
            return [option]
        self.remarks.append(f"{option.given}: turned off, as --tensor-model-parallel-size is 1")
        return []

    def _optimizer(self, option: Option) -> list[Option]:
        """`dist_muon` is Muon with its state shared out over the data-parallel ranks."""
        if option.values != ["dist_muon"]:
            return [option]
        sharded = Option(option.given, "use-distributed-optimizer", [])
        more = [] if self._last("use-distributed-optimizer") else [sharded]
        return [Option(option.given, "optimizer", ["muon"]), *more]

    def _retro_add_retriever(self, option: Option) -> list[Option]:
        """A GPT with a retriever is a family of its own."""
        given = self._last("model-type")
        if given is not None and given.value != "retro":
            raise ConfigError(
                f"{option.given} means --model-type retro, but --model-type is {given.value}; "
                "leave one of them out"
            )
        return [] if given is not None else [Option(option.given, "model-type", ["retro"])]

    def _spec(self, option: Option) -> list[Option]:
        """The layers of a hybrid are a family of their own; any other module is the user's."""
        if option.values == ["local"]:
            return []
        if option.values[-1:] != [HYBRID_SPEC]:
            raise ConfigError(
                f"{option.given} {' '.join(option.values)}: pass a model of your own to the "
                "library (docs/library.md)"
            )
        given = self._last("model-type")
        if given is not None and self.vocabulary.value("model-type", given.value) != "mamba":
            raise ConfigError(
                f"{option.given} {HYBRID_SPEC} means --model-type mamba, but --model-type is "
                f"{given.value}; leave one of them out"
            )
        return [] if given is not None else [Option(option.given, "model-type", ["mamba"])]

    def _hybrid_pattern(self, option: Option) -> list[Option]:
        """It says how many layers there are where --num-layers does not, as in newer releases."""
        if self._last("num-layers", "config", "yaml-cfg", "use-checkpoint-args") is not None:
            return [option]
        return [option, Option(option.given, "num-layers", [str(len(unquoted(option.value)))])]

    def _data_folder(self, option: Option) -> list[Option]:
        """Instruction data by the names of its data sets, each a folder with two files."""
        named = self._last("data-path")
        if named is None:
            raise ConfigError(f"{option.given} is the folder of --data-path; give --data-path too")
        self.options = [o for o in self.options if o.name != "data-path"]
        folder = option.value.rstrip("/")

        def files(kind: str) -> list[str]:
            return [
                value if is_number(value) else f"{folder}/{value}/{value}_QA_{kind}.json"
                for value in named.values
            ]

        return [
            Option(option.given, "train-data-path", files("train")),
            Option(option.given, "valid-data-path", files("dev")),
            *([] if self._last("sft") else [Option(option.given, "sft", [])]),
        ]

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
                f"{option.given}: {NO_EFFECT}: this command starts all ranks itself and chooses a "
                "free port for them"
            )
            return []
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", str(port))):
            launched = self.environ.get(name)
            if launched is None:
                self.environment[name] = value
            elif launched != value:
                self.remarks.append(f"{option.given}: the launcher's {name}={launched} wins")
        return []

    def _local_rank(self, option: Option) -> list[Option]:
        if "RANK" in self.environ and "LOCAL_RANK" not in self.environ:
            self.environment["LOCAL_RANK"] = option.value
        else:
            reason = (
                f"the launcher's LOCAL_RANK={self.environ['LOCAL_RANK']} wins"
                if "RANK" in self.environ
                else "this command starts all ranks itself"
            )
            self.remarks.append(f"{option.given}: {NO_EFFECT}: {reason}")
        return []


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


def _spelt(option: Option) -> str:
    return option.given.lstrip("-").replace("_", "-").removeprefix("no-").removeprefix("disable-")
