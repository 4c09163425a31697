"""Which tokenizer, by Megatron's option names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import location
from trainyard.errors import ConfigError

TokenizerType = Literal["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer and the files it is made of. Nothing is ever looked up on a hub."""

    tokenizer_type: TokenizerType
    """Kind of tokenizer, by Megatron's name."""
    tokenizer_model: str | None = location(None)
    """HuggingFaceTokenizer: a tokenizer.json, or the folder that holds one."""
    vocab_file: str | None = location(None)
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = location(None)
    """GPT2BPETokenizer: merges.txt."""
    vocab_size: int | None = None
    """NullTokenizer: number of ids, the last of which is the end of a document. The others know
    their own; a size given for them must be that one."""
    vocab_extra_ids: int = 0
    """Sentinel tokens <extra_id_N> to add; none of the kinds above takes any."""

    def __post_init__(self) -> None:
        kind = self.tokenizer_type
        if kind == "GPT2BPETokenizer":
            self._need("vocab_file", "merge_file")
        elif kind == "HuggingFaceTokenizer":
            self._need("tokenizer_model")
        elif self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"--vocab-size must be positive, got {self.vocab_size}")
        if self.vocab_extra_ids != 0:
            raise ConfigError(
                f"--vocab-extra-ids {self.vocab_extra_ids}: {kind} takes none; leave the option out"
            )

    def _need(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs {flag}")

    def inputs(self) -> tuple[str, ...]:
        """URLs of the files it is made of, for a stage to declare."""
        if self.tokenizer_type == "GPT2BPETokenizer":
            return tuple(url for url in (self.vocab_file, self.merge_file) if url)
        if self.tokenizer_type == "HuggingFaceTokenizer" and self.tokenizer_model:
            return (self.tokenizer_model,)
        return ()
