"""Options of `python -m stages.tokenize`, by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.folder_in_shares import PrefixInShares
from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_RANKS,
    also,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, check_bound
from trainyard.corpus.pairs import BAD_LINES, BLOCKS, DOCS, PAIR, SHARE, SUMS
from trainyard.corpus.sentences import model_inputs, nltk_version
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeConfig(PrefixInShares):
    """Turn text into Megatron token files: PREFIX_KEY_document.bin and .idx, and .docs with the
    origin of every document.

    The bytes written depend only on the input and the options, not on workers, partitions or ranks,
    nor on how often the run was killed. Documents keep the order of the input."""

    input: tuple[str, ...] = location()
    """Files, folders, patterns or URLs: JSONL (.jsonl, .json), Parquet (.parquet) or plain text
    (.txt); all but Parquet also as .gz, .zst, .xz or .bz2."""
    output_prefix: str = location()
    """Prefix of the output files: a path or URL to which their names are appended."""
    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...] = also("json_key", default=("text",))
    """JSON keys that hold the text, or a list of sentences; each key gets separate files. Also
    --json-key."""
    append_eod: bool = False
    """End every document that is not empty with the end-of-document token."""
    split_sentences: bool = False
    """Make every sentence a separate sequence; the files are PREFIX_KEY_sentence.*."""
    keep_newlines: bool = False
    """With --split-sentences: keep the line breaks between sentences."""
    lang: str = "english"
    """With --split-sentences: language of the text, for which NLTK's punkt_tab must have a model.
    `none` needs no model, but ends sentences at abbreviations too."""
    id_key: str = "id"
    """JSON key whose value is recorded as the id of a document, if it has that key."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What to do with a line that is not a document, or that the tokenizer refuses. stop: fail and
    publish nothing; skip: count it and list it in PREFIX.bad_lines.jsonl."""
    max_bad_lines: int | None = None
    """With --on-bad-line skip: stop if there are more. Unset: no limit."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Largest document in bytes after decompression (of its line, or in Parquet of its texts); a
    larger one is treated as a bad line."""
    validate_tokenizer: float = 0.0
    """Share of the documents, from 0 to 1, to encode with the tokenizer's reference library as
    well. The first difference is an error."""
    workers: int | None = execution(None)
    """Number of workers, at most the number of cores. Unset: the number of cores."""
    partitions: int = execution(1)
    """Accepted for Megatron-LM's command lines and ignored: the input is always divided finely."""
    keep_sequential_samples: bool = execution(False)
    """Accepted for Megatron-LM's command lines and ignored: documents always keep their order."""
    log_interval: int = execution(1000)
    """Documents between two lines of progress; at most one line a second is logged."""
    rank: int | None = execution(None)
    """With --world-size: make only this share of the output, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("--input names no file")
        if not self.json_keys:
            raise ConfigError("--json-keys names no key")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(f"--json-keys names a key twice: {' '.join(self.json_keys)}")
        if any("/" in key or not key for key in self.json_keys):
            raise ConfigError(
                f"--json-keys {' '.join(self.json_keys)}: a key becomes part of a file name, so "
                "it must not be empty or contain '/'"
            )
        self._check_numbers()
        self._check_sentences()
        self.check_rank()

    def _check_numbers(self) -> None:
        check_at_least(self, 1, "workers", "partitions", "log_interval", "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        check_bound(self.max_document_bytes)
        if not 0 <= self.validate_tokenizer <= 1:
            raise ConfigError(
                "--validate-tokenizer must be a share of the documents, 0 to 1, got "
                f"{self.validate_tokenizer}"
            )
        if self.max_bad_lines is not None and self.max_bad_lines < 0:
            raise ConfigError(f"--max-bad-lines must not be negative, got {self.max_bad_lines}")
        if self.max_bad_lines is not None and self.on_bad_line == "stop":
            raise ConfigError(
                f"--max-bad-lines {self.max_bad_lines}: the first one stops the run; add "
                "--on-bad-line skip, or leave the option out"
            )

    def _check_sentences(self) -> None:
        if self.split_sentences:
            return
        for flag, given in (("--keep-newlines", self.keep_newlines), ("--lang", self.lang)):
            if given not in (False, "english"):
                raise ConfigError(f"{flag} needs --split-sentences: nothing is split without it")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The corpus, the tokenizer's files, and the model that finds the ends of sentences."""
        model = model_inputs(self.lang) if self.split_sentences else ()
        return {"input": self.input, "tokenizer": self.tokenizer.inputs(), "sentences": model}

    def versions(self) -> dict[str, str]:
        """NLTK's, which decides where sentences end, and of the libraries that encode."""
        nltk = {"nltk": nltk_version()} if self.split_sentences else {}
        return {**nltk, **self.tokenizer.encoding_versions()}

    def output(self) -> Output | None:
        """The prefix of the output, or of a share."""
        return Output.prefix(
            self.output_prefix if self.rank is None else self.share_prefix(self.rank),
            self._names(),
        )

    def _names(self) -> list[str]:
        """All that may follow the prefix."""
        stems = [self.file_stem(key) for key in self.json_keys]
        names = [stem + ending for stem in stems for ending in (*PAIR, DOCS, SUMS)]
        names += [BAD_LINES] if self.on_bad_line == "skip" else []
        return [*names, *([".shares"] if self.rank is None else [SHARE, BLOCKS])]

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the corpus that they read."""
        return ("input",)

    def file_stem(self, key: str) -> str:
        """What follows the prefix in the names of a key's files, by Megatron's rule."""
        return f"_{key}_{'sentence' if self.split_sentences else 'document'}"
