"""Options of `python -m stages.clean`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.collection.options import DocumentsConfig, chosen_tokenizer
from trainyard.collection.rules.table import COUNTS_TOKENS, PRESETS, RuleSpec, parse_rule
from trainyard.collection.versions import versions_of
from trainyard.config import (
    MAX_RANKS,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.errors import ConfigError
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanConfig(FolderInShares):
    """Clean documents by rules, in order, until one drops the document; the dropped ones are kept
    aside, each with the reason."""

    documents: DocumentsConfig
    output_dir: str = location()
    """Folder or URL for documents-N.jsonl, dropped-N.jsonl and report.json."""
    preset: Literal["openwebtext", "wikipedia", "c4", "fineweb", "none"] = "none"
    """A list of rules, which come before those of --rules."""
    rules: tuple[str, ...] = ()
    """Rules to apply, as NAME or NAME:KEY=VALUE,KEY=VALUE, such as min_chars:limit=200."""
    mask_pii: tuple[Literal["emails", "ips", "phones"], ...] = ()
    """Personal data to mask after all rules."""
    tokenizer_type: TokenizerType | None = None
    """Tokenizer of the rule min_tokens."""
    tokenizer_model: str | None = location(None)
    """Its tokenizer.json or its folder, or a SentencePiece .model."""
    vocab_file: str | None = location(None)
    """GPT2BPETokenizer: vocab.json. BertWordPiece: vocab.txt."""
    merge_file: str | None = location(None)
    """GPT2BPETokenizer: merges.txt."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores. Unset: the number of cores."""
    rank: int | None = execution(None)
    """With --world-size: make only this share of the output, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "workers", "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        self.check_rank()
        specs = self.rule_specs()
        if not specs:
            raise ConfigError(
                "--preset none: there is no rule to clean by; name some with --rules, or one of "
                f"the presets {' '.join(name for name in PRESETS if name != 'none')}"
            )
        counts = [spec.written for spec in specs if spec.name == COUNTS_TOKENS]
        if counts and self.tokenizer() is None:
            raise ConfigError(
                f"rule {counts[0]} counts tokens and needs --tokenizer-type with its files, such "
                "as GPT2BPETokenizer with --vocab-file and --merge-file"
            )
        if not counts and self.tokenizer() is not None:
            raise ConfigError(
                f"--tokenizer-type {self.tokenizer_type}: no rule counts tokens; leave it out, or "
                f"add {COUNTS_TOKENS} to --rules"
            )

    def rule_specs(self) -> list[RuleSpec]:
        """All rules, in order."""
        masks = [f"mask_{kind}" for kind in self.mask_pii]
        return [parse_rule(rule) for rule in (*PRESETS[self.preset], *self.rules, *masks)]

    def tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer that a rule counts with; ConfigError if it lacks an option."""
        return chosen_tokenizer(self)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The documents, and the tokenizer's files."""
        tokenizer = self.tokenizer()
        files = tokenizer.inputs() if tokenizer is not None else ()
        return {"input": self.documents.input, "tokenizer": files}

    def versions(self) -> dict[str, str]:
        """Of the libraries that decide what is kept."""
        tokenizer = self.tokenizer()
        more = tokenizer.encoding_versions() if tokenizer is not None else {}
        return {**versions_of("ftfy", "py3langid"), **more}

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the documents that they read."""
        return ("input",)

    def output(self) -> Output | None:
        """A folder, or that of a share."""
        return self.own_folder()
