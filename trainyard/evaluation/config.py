"""Options of an evaluation, under the names of Megatron-LM's tasks. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trainyard.config import MAX_SIZE, check_at_least, check_at_most
from trainyard.errors import ConfigError

TaskName = Literal["WIKITEXT103"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The protocol, and how it divides the text into windows."""

    task: TaskName
    """Protocol; WIKITEXT103 is perplexity of any text file."""
    detokenizer: Literal["auto", "wikitext", "none"] = "auto"
    """How the file becomes plain text; auto: wikitext if its name or folder contains "wiki"."""
    overlapping_eval: int = 32
    """Tokens from one window to the next: fewer give every token more context and cost more."""
    seq_length: int | None = None
    """Tokens of a window; unset: the sequence length of the training."""
    micro_batch_size: int = 4
    """Windows evaluated at a time."""

    def __post_init__(self) -> None:
        """Raise ConfigError for counts out of range."""
        check_at_least(self, 1, "overlapping_eval", "seq_length", "micro_batch_size")
        check_at_most(self, MAX_SIZE, "seq_length", "micro_batch_size")

    def for_file(self, path: str) -> EvaluationConfig:
        """The same options with `auto` resolved, by "wiki" in the name of the file or its folder.

        Upstream looks at the whole path, where a user called wikitor would count."""
        if self.detokenizer != "auto":
            return self
        near = "/".join(path.split("/")[-2:])
        return replace(self, detokenizer="wikitext" if "wiki" in near else "none")

    def window(self, trained_length: int, num_positions: int) -> int:
        """Tokens of a window: --seq-length, or that of the training. Refuses more than the model's
        positions."""
        length = self.seq_length or trained_length
        if length > num_positions:
            raise ConfigError(
                f"--seq-length {length} is longer than the {num_positions} positions of the model"
            )
        if self.overlapping_eval > length:
            raise ConfigError(
                f"--overlapping-eval {self.overlapping_eval} is longer than a window of {length} "
                "tokens, so targets would be left out; make it at most that"
            )
        return length
