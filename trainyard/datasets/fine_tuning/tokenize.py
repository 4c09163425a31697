"""The tokens of records of instruction data, and which of them are learnt.

Conversations are laid out by the tokenizer's prompt format or chat template (`tokenizers.chat`),
questions by InstructRetro's prompts (`questions`) and any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.datasets.fine_tuning.config import SftConfig
from trainyard.datasets.fine_tuning.questions import (
    GPT_WORDING,
    Contexts,
    PromptFormat,
    Wording,
    read_question,
)
from trainyard.datasets.fine_tuning.records import QuestionRecord
from trainyard.datasets.plain_text import PlainText
from trainyard.errors import ConfigError

IGNORED = -100
"""The label of a token that is not learnt."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InstructionTokenizer:
    """A `sft.RecordTokenizer` by the options of a training."""

    tokenizer: Any
    """A `tokenizers.base.Tokenizer`; with `tokenize_conversation` if it has a prompt format."""
    options: SftConfig
    wording: Wording = GPT_WORDING

    def tokenize_conversation(self, conversation: Sequence[dict[str, Any]]) -> tuple[Ids, Ids]:
        """Tokens and targets of one conversation. ConfigError if the tokenizer has no format."""
        lay_out = getattr(self.tokenizer, "tokenize_conversation", None)
        if lay_out is None:
            raise ConfigError(
                f"--tokenizer-type {self.tokenizer.config.tokenizer_type} has no format of "
                "conversations, which the data has; give --tokenizer-type SFTTokenizer with the "
                "same --tokenizer-model, or to stages.finetune a --chat-template if the checkpoint "
                "has a HuggingFaceTokenizer"
            )
        found: tuple[Ids, Ids] = lay_out(conversation, answers_only=self.options.answer_loss_only)
        return found

    def tokenize_question(self, record: QuestionRecord, task: str, room: int) -> tuple[Ids, Ids]:
        """Tokens and targets of a question with its first answer. As in Megatron-LM, contexts that
        are too long are cut, then the prompt, then the answer."""
        options = self.options
        question = read_question(record, contexts_of(options), options.longform_answer)
        if not question.answers:
            raise ValueError("a question without an answer: no 'answers' or 'answer', or no entry")
        plain = PlainText(self.tokenizer)
        answer = plain.encode(f" {question.answers[0]}")
        prompt_format = PromptFormat(
            task=task, wording=self.wording, num_contexts=options.ft_neighbours
        )
        left = room - len(plain.before) - len(answer)
        prompt = [*plain.before, *prompt_format.prompt(question, plain, left)][: room - 1]
        tokens = np.array((prompt + answer)[:room], np.int64)
        targets = tokens.copy()
        if options.answer_loss_only:
            targets[: len(prompt)] = IGNORED
        return tokens, targets


def contexts_of(options: SftConfig) -> Contexts:
    """Where the contexts of questions are."""
    if options.bert_retriever_neighbours:
        return "bert"
    return "retrieved" if options.use_retrieved_neighbours else "given"
