"""Options of a BERT. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.config import MAX_SIZE, check_at_least, check_at_most
from trainyard.errors import ConfigError
from trainyard.models.config import ModelType, TransformerConfig

SOP_LOSS = "sop loss"
"""The loss of the order of sentences in the log, as in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """An encoder that predicts hidden words, and whether two runs of sentences are in their order:
    BERT as Megatron-LM trains it, pre-norm, or as Google did, post-norm."""

    model_type: ModelType = "bert"
    bert_binary_head: bool = True
    """Predict from the pooled first token whether two runs of sentences are in their order; without
    it there is no pooler, and a sample is one run of sentences."""
    num_tokentypes: int | None = None
    """Rows of the token type embedding; unset: 2 with --bert-binary-head, otherwise 0."""
    post_layernorm: bool = False
    """Normalise after attention and MLP, and after the embedding, as google-bert's checkpoints do;
    otherwise before them and at the end, as Megatron-LM does."""

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other or cannot be built."""
        super().__post_init__()
        check_at_least(self, 0, "num_tokentypes")
        check_at_most(self, MAX_SIZE, "num_tokentypes")
        if self.bert_binary_head and not self.token_types:
            raise ConfigError(
                "--num-tokentypes 0 with --bert-binary-head: the two runs of sentences need a type "
                "each; give 2, or --no-bert-binary-head"
            )
        if self.post_layernorm and self.recomputes("layernorm"):
            raise ConfigError(
                "--recompute-modules layernorm recomputes the norm before a matrix, and with "
                "--post-layernorm there is none; leave it out"
            )

    @property
    def token_types(self) -> int:
        """Rows of the token type embedding, given or derived."""
        if self.num_tokentypes is not None:
            return self.num_tokentypes
        return 2 if self.bert_binary_head else 0

    def embedding_params(self) -> int:
        """Positions, token types, and with --post-layernorm a norm."""
        types = self.token_types * self.hidden_size
        norm = self.norm_params() if self.post_layernorm else 0
        return super().embedding_params() + types + norm

    def output_params(self, rows: int) -> int:
        """The final norm without --post-layernorm, the head of words, and that of sentences."""
        h = self.hidden_size
        final = 0 if self.post_layernorm else self.norm_params()
        words = h * h + h + self.norm_params() + rows
        sentences = h * h + h + 2 * h + 2 if self.bert_binary_head else 0
        return final + words + sentences
