"""Options of `python -m stages.mix`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.collection.options import Count, chosen_tokenizer
from trainyard.collection.proportions import Proportions
from trainyard.collection.versions import versions_of
from trainyard.config import MAX_RANKS, check_at_least, check_at_most, execution, flag, location
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, check_bound
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType

SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

MAX_REPEATS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig(FolderInShares):
    """Mix the documents of several sources in given proportions, and shuffle them. Without
    proportions, all documents are shuffled once."""

    input: tuple[str, ...] = location()
    """For each of --sources, a file, folder, pattern or URL."""
    sources: tuple[str, ...]
    """Names of the sources, one for each place of --input; places with the same name are one
    source. A document has its source and its epoch under the key `mixed`."""
    output_dir: str = location()
    """Folder or URL for documents-N.jsonl and report.json."""
    weights: tuple[float, ...] | None = None
    """Share of each source in the mixture, in proportion to each other, in the order of their
    names."""
    temperature: float | None = None
    """Shares in proportion to size ** (1 / temperature): at 1 as they are, above it more level."""
    epochs: tuple[float, ...] | None = None
    """How often each source is repeated, such as 2.5 0.3; a part of an epoch is drawn."""
    size: int | None = None
    """Of the mixture, as --count counts. Unset: the largest that --max-epochs allows."""
    max_epochs: float = 4.0
    """How often a source may be repeated at most, with --weights or --temperature: up to 4 times is
    nearly as good as new text (arXiv:2305.16264)."""
    count: Count = "bytes"
    """What sizes are counted in: tokens of the tokenizer, words between blanks, or bytes of
    UTF-8."""
    tokenizer_type: TokenizerType | None = None
    """Tokenizer of --count tokens."""
    tokenizer_model: str | None = location(None)
    """Its tokenizer.json or its folder, or a SentencePiece .model."""
    vocab_file: str | None = location(None)
    """GPT2BPETokenizer: vocab.json. BertWordPiece: vocab.txt."""
    merge_file: str | None = location(None)
    """GPT2BPETokenizer: merges.txt."""
    shard_size_mb: float = 100.0
    """Text in a file of the output, about, in megabytes (10^6 bytes). A worker holds one in
    memory."""
    seed: int = 1234
    """Seed of the order and of what is drawn."""
    json_key: str = "text"
    """Key of the text. A document keeps all its other keys (of Parquet: the id)."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """What to do about a line that is not a document. stop: fail and publish nothing; skip: count
    it."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Largest document, in bytes after decompression; a larger one is a bad line."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores. Unset: the number of cores."""
    rank: int | None = execution(None)
    """With --world-size: count this share only, from 0. Shares may run at the same time, on
    different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: mix what all shares counted; the result equals that of one
    run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "workers", "world_size", "size")
        check_at_least(self, 0, "seed")
        check_at_most(self, MAX_RANKS, "world_size")
        check_at_most(self, 2**64 - 1, "seed")
        check_bound(self.max_document_bytes)
        self.check_rank()
        if not self.json_key:
            raise ConfigError("--json-key is empty; name the key of the text, such as text")
        self._check_sources()
        self._check_proportions()
        self._check_count()

    def _check_sources(self) -> None:
        if not self.sources or len(self.sources) != len(self.input):
            raise ConfigError(
                f"--sources has {len(self.sources)} names and --input {len(self.input)} places; "
                "give a name for each place, the same for all places of a source"
            )
        for name in self.sources:
            if not SOURCE_NAME.fullmatch(name):
                raise ConfigError(
                    f"--sources {name}: a name is of letters, digits, _, - and ., and begins with "
                    "a letter or digit"
                )

    def _check_proportions(self) -> None:
        given = [flag(n) for n in ("weights", "temperature", "epochs") if getattr(self, n)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both decide the proportions; give one")
        if self.epochs is not None and self.size is not None:
            raise ConfigError("--epochs decides the size of the mixture; leave out --size")
        for name in ("weights", "epochs"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(names := self.places()):
                raise ConfigError(
                    f"{flag(name)} has {len(values)} numbers for {len(names)} sources "
                    f"({' '.join(names)}); give one for each"
                )
            _check_positive(name, *values)
        _check_positive("max_epochs", self.max_epochs)
        _check_positive("shard_size_mb", self.shard_size_mb)
        if self.temperature is not None:
            _check_positive("temperature", self.temperature)
        for value in (*(self.epochs or ()), self.max_epochs):
            if value > MAX_REPEATS:
                raise ConfigError(f"{value:g} epochs are more than {MAX_REPEATS:g}, the most")

    def _check_count(self) -> None:
        if self.count == "tokens" and self.tokenizer() is None:
            raise ConfigError(
                "--count tokens needs --tokenizer-type with its files, such as GPT2BPETokenizer "
                "with --vocab-file and --merge-file"
            )
        if self.count != "tokens" and self.tokenizer() is not None:
            raise ConfigError(
                f"--tokenizer-type {self.tokenizer_type}: --count {self.count} needs no tokenizer; "
                "leave it out, or give --count tokens"
            )

    def tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer that counts; ConfigError if it lacks an option."""
        return chosen_tokenizer(self)

    def places(self) -> dict[str, tuple[str, ...]]:
        """By source, its places."""
        found: dict[str, tuple[str, ...]] = {}
        for name, url in zip(self.sources, self.input, strict=True):
            found[name] = (*found.get(name, ()), url)
        return found

    def proportions(self) -> Proportions:
        """What is asked of the mixture."""
        return Proportions(self.weights, self.temperature, self.epochs, self.size, self.max_epochs)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The sources, and the tokenizer's files."""
        tokenizer = self.tokenizer()
        return {
            **{f"source.{name}": urls for name, urls in self.places().items()},
            "tokenizer": tokenizer.inputs() if tokenizer is not None else (),
        }

    def versions(self) -> dict[str, str]:
        """Of the libraries that decide the order and the sizes."""
        tokenizer = self.tokenizer()
        more = tokenizer.encoding_versions() if tokenizer is not None else {}
        return {**versions_of("xxhash"), **more}

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the sources that they read."""
        return tuple(f"source.{name}" for name in self.places())

    def output(self) -> Output | None:
        """A folder, or that of a share."""
        return self.own_folder()


def _check_positive(name: str, *values: float) -> None:
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag(name)} must be above 0 and finite, got {value}")
