"""A command line of Megatron-LM while its rules translate it. Knows no flag by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainyard.megatron_cli.options import Option
from trainyard.megatron_cli.spellings import Vocabulary

NO_EFFECT = "ignored"


@dataclass(slots=True)
class CommandLine:
    """The options of a command, and what was found out about them."""

    options: list[Option]
    vocabulary: Vocabulary
    environ: Mapping[str, str]
    """The environment, for what a launcher such as torchrun has set."""
    remarks: list[str] = field(default_factory=list)
    """Lines to log."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the command sets."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Flags without effect, by the reason."""

    def last(self, *names: str) -> Option | None:
        """The last option of one of these names, without leading dashes."""
        return next((o for o in reversed(self.options) if o.name in names), None)

    def ignore(self, option: Option, reason: str) -> None:
        """Report an option as one without effect."""
        self.ignored.setdefault(reason, []).append(option.given)


Rule = Callable[[CommandLine, Option], list[Option]]
"""What stands for an option that is more than another spelling; it may change other options too."""
