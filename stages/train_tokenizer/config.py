"""Options of `python -m stages.train_tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import location
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, check_bound
from trainyard.errors import ConfigError

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTokenizerConfig:
    """Train a byte-level BPE tokenizer on a corpus; writes a Hugging Face tokenizer.json."""

    input: tuple[str, ...] = location()
    """Files, folders, patterns or URLs of JSONL (.jsonl, .json) or text (.txt), also with .gz."""
    output_dir: str = location()
    """Folder or URL to write to; --tokenizer-model of later stages."""
    vocab_size: int = 8192
    """Number of tokens, the 256 bytes and <|endoftext|> included."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON document that hold text."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Largest document, in bytes after decompression (of its line; in Parquet, of its texts); a
    larger one stops the run."""

    def __post_init__(self) -> None:
        least = NUM_BYTES + len(SPECIAL_TOKENS)
        if self.vocab_size < least:
            raise ConfigError(
                f"--vocab-size must be at least {least} (256 bytes, {' '.join(SPECIAL_TOKENS)}), "
                f"got {self.vocab_size}"
            )
        check_bound(self.max_document_bytes)
        if not self.input:
            raise ConfigError("--input names no file")
        if not self.json_keys:
            raise ConfigError("--json-keys names no key")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The corpus."""
        return {"input": self.input}

    def versions(self) -> dict[str, str]:
        """Of the library that learns the tokens."""
        from importlib import metadata  # takes 0.03 s

        return {"tokenizers": metadata.version("tokenizers")}

    def output(self) -> Output | None:
        """A folder."""
        return Output.directory(self.output_dir)
