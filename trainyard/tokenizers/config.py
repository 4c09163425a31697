"""Which tokenizer, by Megatron's option names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import also, execution, location
from trainyard.errors import ConfigError

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

FILES = ("tokenizer_model", "vocab_file", "merge_file", "chat_template")
"""Options that name files."""

MAX_VOCAB_SIZE = 2**31 - 1
"""Token files hold ids in 32 bits."""

TAKES_EXTRA_IDS = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer and the files it is made of. Nothing is ever looked up on a hub."""

    tokenizer_type: TokenizerType
    """Kind of tokenizer, by Megatron's name."""
    tokenizer_model: str | None = location(None)
    """A tokenizer.json or the folder that holds one, a SentencePiece .model, or for TikTokenizer
    its ranks as JSON or .tiktoken."""
    vocab_file: str | None = location(None)
    """GPT2BPETokenizer: vocab.json. BertWordPiece: vocab.txt."""
    merge_file: str | None = location(None)
    """GPT2BPETokenizer: merges.txt."""
    vocab_size: int | None = None
    """NullTokenizer: number of ids, the last of which is the end of a document. The others know
    their own; a size given for them must be that one, or for TikTokenizer how many to take."""
    vocab_extra_ids: int = 0
    """Sentinel tokens <extra_id_N> to add (BertWordPiece, SentencePieceTokenizer)."""
    tokenizer_special_tokens: tuple[str, ...] = also(
        "tiktoken_special_tokens", "special_tokens", default=()
    )
    """Special tokens to add (SentencePiece, TikTokenizer), or the tags of MultimodalTokenizer."""
    tokenizer_hf_no_use_fast: bool = False
    """Accepted; there is one Hugging Face tokenizer here, the fast one."""
    tokenizer_hf_include_special_tokens: bool = False
    """BertWordPiece: put [CLS] before and [SEP] after every text or sentence, as Megatron-LM's main
    does; BERT's dataset adds its own. HuggingFaceTokenizer puts its special tokens anyway."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the special tokens that a Hugging Face tokenizer puts around a text."""
    tokenizer_sentencepiece_legacy: bool = False
    """SentencePieceTokenizer: cut the text at special tokens, as NeMo's old models want it."""
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    """SentencePieceTokenizer: runs of spaces count as the model says; otherwise every one is
    kept."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """TikTokenizer: how text is cut into words. v2 when not given."""
    tiktoken_num_special_tokens: int = 1000
    """TikTokenizer: ids kept for special tokens, before those of the ranks."""
    chat_template: str | None = location(None)
    """A Jinja file that lays out a conversation, in place of the tokenizer's own."""
    sft_tokenizer_prompt_format: str = "nemotron-h-aligned"
    """SFTTokenizer: nemotron-h-aligned, nemotron-nano-v2, identity or default."""
    tokenizer_prompt_format: str | None = None
    """MultimodalTokenizer: how turns are laid out, such as llama3 or qwen2p5."""
    image_tag_type: str = ""
    """MultimodalTokenizer: tags around an image: nvlm, internvl, or none."""
    force_system_message: bool = False
    """MultimodalTokenizer: begin every conversation with the format's own system message."""
    legacy_tokenizer: bool = execution(False)
    """Accepted, as Megatron takes it; it changes nothing here."""
    trust_remote_code: bool = execution(False)
    """Accepted, as Megatron takes it; no code from a tokenizer's folder is ever run."""
    use_gigatoken: bool = execution(True)
    """Encode with gigatoken where it knows the tokenizer; the ids are the same without."""

    def __post_init__(self) -> None:
        kind = self.tokenizer_type
        for name in NEEDS[kind]:
            if getattr(self, name) in (None, ""):
                raise ConfigError(f"--tokenizer-type {kind} needs --{name.replace('_', '-')}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"--vocab-size must be positive, got {self.vocab_size}")
        if self.vocab_size is not None and self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(
                f"--vocab-size must be at most {MAX_VOCAB_SIZE}, as token files hold ids in 32 "
                f"bits, got {self.vocab_size}"
            )
        if self.vocab_extra_ids < 0 or (self.vocab_extra_ids and kind not in TAKES_EXTRA_IDS):
            raise ConfigError(
                f"--vocab-extra-ids {self.vocab_extra_ids}: {kind} takes none; leave the option out"
            )
        if self.tokenizer_hf_include_special_tokens and self.tokenizer_hf_no_include_special_tokens:
            raise ConfigError(
                "--tokenizer-hf-include-special-tokens and "
                "--tokenizer-hf-no-include-special-tokens exclude each other; give one of them"
            )
        if self.tiktoken_num_special_tokens < 3:
            raise ConfigError(
                f"--tiktoken-num-special-tokens {self.tiktoken_num_special_tokens}: at least 3, "
                "for <unk>, <s> and </s>"
            )

    def inputs(self) -> tuple[str, ...]:
        """URLs of the files it is made of, for a stage to declare."""
        used = set(NEEDS[self.tokenizer_type]) | {"chat_template"}
        urls = (getattr(self, name) for name in FILES if name in used)
        return tuple(url for url in urls if url)
