"""Options that stages from documents to documents share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainyard.config import check_at_least, check_at_most, from_dict, location
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, check_bound
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig

Count = Literal["tokens", "words", "bytes"]

TOKENIZER_OPTIONS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsConfig:
    """The documents to read, and what is written about those that are left out."""

    input: tuple[str, ...] = location()
    """Files, folders, patterns or URLs: JSONL (.jsonl, .json), Parquet (.parquet) or plain text
    (.txt); all but Parquet also as .gz, .zst, .xz or .bz2."""
    json_key: str = "text"
    """Key of the text. A document keeps all its other keys (of Parquet: the id)."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What to do about a line that is not a document. stop: fail and publish nothing; skip: count
    it among the dropped documents."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Largest document, in bytes after decompression; a larger one is a bad line."""
    num_samples: int = 20
    """Documents to show for each reason in report.json."""

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("--input names no file")
        if not self.json_key:
            raise ConfigError("--json-key is empty; name the key of the text, such as text")
        check_bound(self.max_document_bytes)
        check_at_least(self, 0, "num_samples")
        check_at_most(self, 10_000, "num_samples")


def chosen_tokenizer(options: Any) -> TokenizerConfig | None:
    """The tokenizer that options of these names describe; None without a type, ConfigError for one
    that lacks a file."""
    if options.tokenizer_type is None:
        return None
    named = {name: getattr(options, name) for name in TOKENIZER_OPTIONS}
    return from_dict(TokenizerConfig, {k: v for k, v in named.items() if v is not None})
