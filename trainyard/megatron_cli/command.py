"""Translates a command line in Megatron-LM's spelling, or that of guides to it, into ours.

An option that we have under another name is renamed. An option without effect is dropped and
reported. An unsupported option raises an error that says what to do instead; an unknown one, an
error that names the nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainyard.errors import ConfigError
from trainyard.megatron_cli.command_line import NO_EFFECT, CommandLine
from trainyard.megatron_cli.model_rules import MODEL_RULES
from trainyard.megatron_cli.options import Option, split_options, unquoted
from trainyard.megatron_cli.rank_rules import RANK_RULES
from trainyard.megatron_cli.run_rules import RUN_RULES
from trainyard.megatron_cli.spellings import Vocabulary
from trainyard.megatron_cli.text_rules import TEXT_RULES

RULES = MODEL_RULES | RUN_RULES | RANK_RULES | TEXT_RULES
"""What to do with each flag that is more than another spelling, where a command has it."""

EXPECT = "expect"
"""The option of a command with a checkpoint that takes the options that its model must have."""

TEXTS = ("prompts",)
"""Options whose values are texts, in which quotes mean themselves."""


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
        self.line = CommandLine(options, vocabulary, environ)
        self._checked: dict[str, str] = {}

    def understood(self) -> Understood:
        if any(option.name == "help" for option in self.line.options):
            return Understood([*self.first, "--help"])
        self._apply_rules()
        kept = [
            kept for option in self.line.options if (kept := self._translated(option)) is not None
        ]
        self._refuse_two_names(kept)
        if self._checked:
            kept.append(
                Option(f"--{EXPECT}", EXPECT, [f"{k}={v}" for k, v in self._checked.items()])
            )
        effects = [
            f"{', '.join(flags)}: {NO_EFFECT}: {reason}"
            for reason, flags in self.line.ignored.items()
        ]
        tokens = [token for option in kept for token in option.tokens()]
        return Understood(
            [*self.first, *tokens], self.line.remarks + effects, self.line.environment
        )

    def _translated(self, option: Option) -> Option | None:
        meaning = self.line.vocabulary.meaning(option.name)
        if meaning.kind == "ours":
            return Option(option.given, meaning.name, self._values(meaning.name, option))
        if meaning.kind == "checked":
            self._check_later(meaning.name, self._values(meaning.name, option))
            return None
        if meaning.kind == "absent" and self.line.vocabulary.is_harmless(
            option.name, option.values
        ):
            return None
        if meaning.kind == "accepted":
            self.line.ignore(option, meaning.reason)
            return None
        if meaning.kind == "absent":
            raise ConfigError(f"{option.given} is not supported: {meaning.reason}")
        raise ConfigError(f"{option.given} is not an option: {meaning.reason}")

    def _values(self, name: str, option: Option) -> list[str]:
        """The values in our spelling, without the quotes that a script left around them."""
        found = []
        for value in option.values:
            if (refusal := self.line.vocabulary.refusal(name, value)) is not None:
                raise ConfigError(f"{option.given} {value}: {refusal}")
            bare = value if name in TEXTS else unquoted(value)
            found.append(self.line.vocabulary.value(name, bare))
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

    def _apply_rules(self) -> None:
        line = self.line
        for option in list(line.options):
            rule = RULES.get(option.name)
            if rule is not None and option.name in line.vocabulary.rules:
                instead = rule(line, option)
                at = next(i for i, o in enumerate(line.options) if o is option)
                line.options[at : at + 1] = instead


def _spelt(option: Option) -> str:
    return option.given.lstrip("-").replace("_", "-").removeprefix("no-").removeprefix("disable-")
