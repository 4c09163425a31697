"""Options of supervised fine-tuning. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_at_least
from trainyard.errors import ConfigError

Packing = Literal["line", "off", "lines"]
"""line: the conversations of a line share a sample, as in Megatron-LM; off: a line is one
conversation and one sample, as in its v0.15; lines: lines that fit share a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Training on conversations and questions instead of documents."""

    sft: bool = False
    """Train on instruction data: --data-path names files of conversations or of questions with
    answers, .jsonl or .json. Conversations need --tokenizer-type SFTTokenizer."""
    sft_packing: Packing = "line"
    """line: the conversations of a line share a sample; lines: lines that fit share a sample, which
    wastes the least; off: a line is one conversation and one sample."""
    answer_loss_only: bool = True
    """Leave all but the answers out of the loss. Otherwise every token counts, as with
    Megatron-LM's prompt format `default`."""
    ft_neighbours: int = 1
    """Questions: at most this many of its contexts are written before a question; 0: none."""
    use_retrieved_neighbours: bool = False
    """Questions: take the contexts that were retrieved (key ctxs), not those that the data set
    gives (sub-paragraphs)."""
    bert_retriever_neighbours: bool = False
    """Questions: take the contexts of key bert_pretrain_corpus_neighbours."""
    longform_answer: bool = False
    """Questions: learn the answer of key longform_answer; records without one are refused."""

    def __post_init__(self) -> None:
        """Refuse contexts from two places."""
        check_at_least(self, 0, "ft_neighbours")
        if self.use_retrieved_neighbours and self.bert_retriever_neighbours:
            raise ConfigError(
                "--use-retrieved-neighbours and --bert-retriever-neighbours exclude each other: "
                "each names the contexts of a question; give one"
            )
