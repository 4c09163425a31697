"""Options of `python -m stages.train_tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import check_at_most, location
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, check_bound
from trainyard.errors import ConfigError

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>",)
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LEAST_WORDPIECE = 100
MAX_VOCAB_SIZE = 10_000_000
"""Of a vocabulary to learn: the trainer makes room for all tokens before it reads a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTokenizerConfig:
    """Train a tokenizer on a corpus: a byte-level BPE as a Hugging Face tokenizer.json, or BERT's
    word pieces as a vocab.txt."""

    input: tuple[str, ...] = location()
    """Files, folders, patterns or URLs of JSONL (.jsonl, .json) or text (.txt), also with .gz."""
    output_dir: str = location()
    """Folder or URL to write to; --tokenizer-model of later stages, or with wordpiece the folder of
    their --vocab-file, vocab.txt."""
    algorithm: Literal["bpe", "wordpiece"] = "bpe"
    """bpe: as GPT-2's. wordpiece: for the tokenizer types BertWordPieceLowerCase and
    BertWordPieceCase."""
    lower_case: bool = True
    """With wordpiece: learn from lower-cased text without accents, for BertWordPieceLowerCase."""
    vocab_size: int = 8192
    """Number of tokens, special ones and the 256 bytes of a BPE included."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON document that hold text."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Largest document, in bytes after decompression (of its line; in Parquet, of its texts); a
    larger one stops the run."""

    def __post_init__(self) -> None:
        if self.algorithm == "bpe":
            least = NUM_BYTES + len(SPECIAL_TOKENS)
            needs = f"256 bytes, {' '.join(SPECIAL_TOKENS)}"
        else:
            least, needs = LEAST_WORDPIECE, "special tokens and characters"
        if self.vocab_size < least:
            raise ConfigError(
                f"--vocab-size must be at least {least} ({needs}), got {self.vocab_size}"
            )
        check_at_most(self, MAX_VOCAB_SIZE, "vocab_size")
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
