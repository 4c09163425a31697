"""Options of `python -m stages.tokenize`, by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeConfig:
    """Turn JSONL or plain text into Megatron token files, PREFIX_KEY_document.bin and .idx."""

    input: tuple[str, ...] = location()
    """Files, folders, patterns or URLs of JSONL (.jsonl, .json) or plain text (.txt), also .gz."""
    output_prefix: str = location()
    """Path or URL that the names of the output begin with."""
    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...] = ("text",)
    """Keys that hold text, or a list of sentences; each makes files of its own."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document token."""
    workers: int = execution(1)
    """Processes; 1 works in this process, with the threads of the tokenizer's library."""
    log_interval: int = execution(1000)
    """Documents between two lines of progress."""

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("--input names no file")
        if not self.json_keys:
            raise ConfigError("--json-keys names no key")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(f"--json-keys names a key twice: {' '.join(self.json_keys)}")
        for flag, value in (("--workers", self.workers), ("--log-interval", self.log_interval)):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The corpus and the tokenizer's files."""
        return {"input": self.input, "tokenizer": self.tokenizer.inputs()}

    def output(self) -> Output | None:
        """A prefix."""
        return Output.prefix(self.output_prefix)
