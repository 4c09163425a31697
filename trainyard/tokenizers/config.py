"""The options of a tokenizer, by Megatron-LM's names. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from trainyard.config import (
    also,
    check_at_most,
    execution,
    from_table,
    location,
)
from trainyard.errors import ConfigError
from trainyard.stored_values import from_stored, stored_as

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
    "SFTTokenizer",
    "MultimodalTokenizer",
]

NEEDS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "ByteLevelTokenizer": (),
    "NullTokenizer": ("vocab_size",),
    "SFTTokenizer": ("tokenizer_model",),
    "MultimodalTokenizer": ("tokenizer_model", "tokenizer_prompt_format"),
}
"""The options without which a type cannot be built."""

LIBRARIES: dict[str, str] = {
    "GPT2BPETokenizer": "tokenizers",
    "BertWordPieceLowerCase": "tokenizers",
    "BertWordPieceCase": "tokenizers",
    "HuggingFaceTokenizer": "tokenizers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "SFTTokenizer": "tokenizers",
    "MultimodalTokenizer": "tokenizers",
}
"""The library that defines the ids of a type."""

NEVER_FAST = ("BertWordPieceLowerCase", "BertWordPieceCase")
"""Types with a library that gigatoken never encodes instead of."""

FILES = ("tokenizer_model", "vocab_file", "merge_file", "chat_template")
"""Options that name files."""

MAX_VOCAB_SIZE = 2**31 - 1
"""Token files store ids in 32 bits."""

MAX_SPECIAL_TOKENS = 1_000_000
"""Of a TikTokenizer, which makes a name for each."""

TAKES_EXTRA_IDS = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")
USUAL_EXTRA_IDS = {"BertWordPieceCase": 100}
"""Without `--vocab-extra-ids`, as in Megatron-LM's main; its releases have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer and its files. Nothing is downloaded from a hub."""

    tokenizer_type: TokenizerType
    """Kind of tokenizer, by Megatron-LM's name."""
    tokenizer_model: str | None = location(None)
    """A tokenizer.json or its folder, a SentencePiece .model, or for TikTokenizer the ranks as JSON
    or .tiktoken."""
    vocab_file: str | None = location(None)
    """GPT2BPETokenizer: vocab.json. BertWordPiece: vocab.txt."""
    merge_file: str | None = location(None)
    """GPT2BPETokenizer: merges.txt."""
    vocab_size: int | None = None
    """NullTokenizer: number of ids; the last one ends a document. TikTokenizer: number of ids to
    keep. For any other type, leave it out, or give the size that the files have."""
    vocab_extra_ids: int | None = stored_as({None: 0, 0: -1})
    """Sentinel tokens <extra_id_N> to add (BertWordPiece, SentencePieceTokenizer). Unset: 100 with
    BertWordPieceCase, otherwise none."""
    tokenizer_special_tokens: tuple[str, ...] = also(
        "tiktoken_special_tokens", "special_tokens", default=()
    )
    """Special tokens to add (SentencePiece, TikTokenizer), or the tags of MultimodalTokenizer."""
    tokenizer_hf_no_use_fast: bool = False
    """Accepted and ignored: Hugging Face tokenizers are always the fast ones."""
    tokenizer_hf_include_special_tokens: bool = False
    """BertWordPiece: add [CLS] before and [SEP] after every text or sentence, as Megatron-LM's main
    does; BERT's dataset adds its own. HuggingFaceTokenizer adds its special tokens anyway."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the special tokens that a Hugging Face tokenizer adds around a text."""
    tokenizer_sentencepiece_legacy: bool = False
    """SentencePieceTokenizer: split the text at special tokens, as NeMo's old models require."""
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    """SentencePieceTokenizer: let the model decide about runs of spaces; if off, keep every
    space."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """TikTokenizer: the pattern that splits text into words. Unset: v2."""
    tiktoken_num_special_tokens: int = 1000
    """TikTokenizer: ids reserved for special tokens, before those of the ranks."""
    chat_template: str | None = location(None)
    """A Jinja file that lays out a conversation, instead of the tokenizer's own template."""
    sft_tokenizer_prompt_format: str = "nemotron-h-aligned"
    """SFTTokenizer: nemotron-h-aligned, nemotron-nano-v2, identity or default."""
    tokenizer_prompt_format: str | None = None
    """MultimodalTokenizer: how turns are laid out, such as llama3 or qwen2p5."""
    image_tag_type: str = ""
    """MultimodalTokenizer: tags around an image: nvlm, internvl, or none."""
    force_system_message: bool = False
    """MultimodalTokenizer: begin every conversation with the format's own system message."""
    legacy_tokenizer: bool = execution(False)
    """Accepted for Megatron-LM's command lines and ignored."""
    trust_remote_code: bool = execution(False)
    """Accepted for Megatron-LM's command lines and ignored: no code from a tokenizer's folder
    runs."""
    use_gigatoken: bool = execution(True)
    """Encode with gigatoken, which is faster, if it supports the tokenizer; the ids are the
    same."""

    def __post_init__(self) -> None:
        kind = self.tokenizer_type
        for name in NEEDS[kind]:
            if getattr(self, name) in (None, ""):
                raise ConfigError(f"--tokenizer-type {kind} needs --{name.replace('_', '-')}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"--vocab-size must be positive, got {self.vocab_size}")
        if self.vocab_size is not None and self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(
                f"--vocab-size must be at most {MAX_VOCAB_SIZE}, as token files store ids in 32 "
                f"bits, got {self.vocab_size}"
            )
        extra = self.vocab_extra_ids or 0
        if extra < 0 or (extra and kind not in TAKES_EXTRA_IDS):
            raise ConfigError(f"--vocab-extra-ids {extra}: {kind} has none; leave the option out")
        if extra == 0 and kind not in USUAL_EXTRA_IDS:  # no difference from an unset one
            object.__setattr__(self, "vocab_extra_ids", None)
        if self.tokenizer_hf_include_special_tokens and self.tokenizer_hf_no_include_special_tokens:
            raise ConfigError(
                "--tokenizer-hf-include-special-tokens and "
                "--tokenizer-hf-no-include-special-tokens exclude each other; give one of them"
            )
        if self.tiktoken_num_special_tokens < 3:
            raise ConfigError(
                "--tiktoken-num-special-tokens must be at least 3, for <unk>, <s> and </s>, got "
                f"{self.tiktoken_num_special_tokens}"
            )
        check_at_most(self, MAX_SPECIAL_TOKENS, "tiktoken_num_special_tokens")

    @property
    def num_extra_ids(self) -> int:
        """Sentinel tokens that are added."""
        return num_extra_ids(self.tokenizer_type, self.vocab_extra_ids)

    def versions(self) -> dict[str, str]:
        """Name and version of the library that defines the ids; empty if there is none, or if it is
        not installed, which building the tokenizer reports."""
        return _versions(LIBRARIES.get(self.tokenizer_type))

    def encoding_versions(self) -> dict[str, str]:
        """`versions`, and that of gigatoken if it may encode: every start compares it with the
        library, but on some texts only."""
        kind = self.tokenizer_type
        may_be_fast = self.use_gigatoken and kind in LIBRARIES and kind not in NEVER_FAST
        return {**self.versions(), **_versions("gigatoken" if may_be_fast else None)}

    def inputs(self) -> tuple[str, ...]:
        """URLs of its files, for a stage to declare as inputs."""
        used = set(NEEDS[self.tokenizer_type]) | {"chat_template"}
        urls = (getattr(self, name) for name in FILES if name in used)
        return tuple(url for url in urls if url)


def num_extra_ids(kind: str, given: int | None) -> int:
    """Sentinel tokens that a type adds. given: `--vocab-extra-ids`, or None."""
    return USUAL_EXTRA_IDS.get(kind, 0) if given is None else given


def of_manifest(options: Mapping[str, Any], urls: Sequence[str], where: str) -> TokenizerConfig:
    """The tokenizer of a finished stage. options: of its manifest, among others. urls: of the
    input that `TokenizerConfig.inputs` names.

    Raises ConfigError for options that no tokenizer has."""
    known = {field.name for field in fields(TokenizerConfig)}
    needed = NEEDS.get(str(options.get("tokenizer_type")), ())
    names = [name for name in FILES if name in needed] + ["chat_template"]
    stored = from_stored(options, fields(TokenizerConfig))
    given = {name: value for name, value in stored.items() if name in known and value is not None}
    return from_table(TokenizerConfig, given | dict(zip(names, urls, strict=False)), where)


def _versions(library: str | None) -> dict[str, str]:
    from importlib import metadata  # takes 0.03 s

    try:
        return {library: metadata.version(library)} if library else {}
    except metadata.PackageNotFoundError:
        return {}
