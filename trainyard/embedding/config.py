"""How texts become vectors. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_at_least
from trainyard.errors import ConfigError

NumberFormat = Literal["fp32", "bf16", "fp16"]
Pooling = Literal["mean", "mean-all", "cls"]

AROUND = 2
"""[CLS] and [SEP] around a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """Options of the embedding of texts by a BERT."""

    retro_bert_max_chunk_length: int = 256
    """BERT tokens of a text, [CLS] and [SEP] included; a longer text is cut."""
    retro_bert_batch_size: int = 128
    """Texts of --retro-bert-max-chunk-length tokens that a batch has room for; of shorter texts it
    holds more."""
    pooling: Pooling = "mean"
    """Vector of a text. mean: mean of its tokens without [CLS] and [SEP], as in Megatron-LM;
    mean-all: with them, as in sentence-transformers; cls: that of [CLS]."""
    normalize: bool = False
    """Scale every vector to length 1, so that squared distances order as cosines do."""
    fp16: bool = False
    """Compute in float16; vectors are pooled and stored in float32."""
    bf16: bool = False
    """Compute in bfloat16; vectors are pooled and stored in float32."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that cannot be."""
        check_at_least(self, AROUND + 1, "retro_bert_max_chunk_length")
        check_at_least(self, 1, "retro_bert_batch_size")
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")

    @property
    def number_format(self) -> NumberFormat:
        """Of weights and hidden states."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def batch_tokens(self) -> int:
        """Most tokens of a batch."""
        return self.retro_bert_batch_size * self.retro_bert_max_chunk_length
