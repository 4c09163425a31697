"""Questions with contexts as prompts: the formats of InstructRetro (arXiv:2310.07713), word for
word as in Megatron-LM's tools/retro/sft.

    System: This is a chat ...

    title: Paris, source: Paris is the capital of France.

    User: Answer the following question with a short span. What is the capital of France?

    Assistant: The answer is

The name of the data set decides what kind of answer is asked for. Contexts are cut, from their end,
to what the answer and the rest of the prompt leave of a sample. Standard library only; knows no
files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainyard.artifacts.urls import basename
from trainyard.errors import ConfigError

Kind = Literal["chat", "dialogue", "short", "true or false", "choice", "long"]
"""chat: the question is a conversation that is laid out already, without contexts; dialogue: the
same with contexts; the others are one question each, by the answer that they ask for."""

Contexts = Literal["given", "retrieved", "bert"]
"""Of which keys: sub-paragraphs or sub_paragraph, ctxs, bert_pretrain_corpus_neighbours."""

SYSTEM = (
    "System: This is a chat between a user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions"
)
ON_CONTEXT = (
    " based on the context. The assistant should also indicate when the answer cannot be found in "
    "the context"
)


@dataclass(frozen=True, slots=True)
class Wording:
    """The words of a prompt for one family of models."""

    system: str
    asks: dict[Kind, str]
    """By kind: the user's turn, with the question for {}."""
    kinds: dict[Kind, tuple[str, ...]]
    """Data sets of each kind, by name; any other asks for a long answer."""

    def kind(self, task: str) -> Kind:
        """The kind of the questions of a data set."""
        return next((kind for kind, tasks in self.kinds.items() if task in tasks), "long")


CHATS = ("oasst", "quiet_cockatoo", "open_inst", "quiet-cockatoo_commercial")
SHORT = (
    *("drop", "NarrativeQA", "QASC", "Quoref", "ROPES", "squad1.1", "squad2.0", "newsqa", "nq"),
    "tqa",
)
GPT_WORDING = Wording(
    f"{SYSTEM}{ON_CONTEXT}.\n\n",
    {
        "short": "Answer the following question with a short span. {}",
        "true or false": "Answer the following question with True or False. {}",
        "choice": "Answer the following question by selecting one of the provided options. {}",
        "long": "Please give a full and complete answer for the question. {}",
    },
    {
        "chat": CHATS,
        "dialogue": ("convqa", "chatgptgen", "doc2dial", "quac", "qrecc", "sharc"),
        "short": (*SHORT, "BioASQ", "DuoRC_ParaphraseRC", "TextbookQA"),
        "true or false": ("boolq", "multirc"),
        "choice": ("race",),
    },
)
"""For a GPT, and for all models when they answer."""
RETRO_WORDING = Wording(
    f"{SYSTEM}.\n\n",
    {
        "short": "{} Answer the above question with a short phrase.",
        "true or false": "{} Answer the above question with True or False.",
        "long": "{} Answer the above question with a long complete answer.",
    },
    {
        "chat": CHATS,
        "dialogue": ("doc2dial", "quac", "qrecc", "sharc"),
        "short": SHORT,
        "true or false": ("BoolQ",),
    },
)
"""For the training of a Retro."""

TEMPLATES = (
    "{system}User: Answer based on context:\n\n{context}{turn}",
    "{system}User: {context}Answer this question based on the article: {turn}",
    "{system}User: {context}{turn}",
    "{system}User: {context}Answer this question: {turn}",
    "{system}User: Read this article and answer this question {context}{turn}",
    "{system}User: {context}Based on the above article, answer a question. {turn}",
    "{system}User: Context: {context}Question: {turn}",
)
"""Of --template-id 1 to 7, in the style of Flan."""


class Encoder(Protocol):
    """The part of a tokenizer that is used."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its contexts, best first, and its answers, any of which is right."""

    text: str
    contexts: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How a question becomes the tokens of a prompt."""

    task: str
    wording: Wording = GPT_WORDING
    num_contexts: int = 1
    short_format: bool = False
    """Only `Question: ... Answer: The answer is` behind the contexts."""
    template_id: int = 0
    """One of `TEMPLATES`, from 1; 0: none."""

    def __post_init__(self) -> None:
        """Refuse a template that does not exist."""
        if not 0 <= self.template_id <= len(TEMPLATES):
            raise ConfigError(
                f"--template-id must be from 0 to {len(TEMPLATES)}, got {self.template_id}"
            )

    def prompt(self, question: Question, tokenizer: Encoder, room: int) -> list[int]:
        """The tokens of a prompt of at most `room`, unless those of the question alone are more."""
        kind = self.wording.kind(self.task)
        if self.short_format:
            asked = question.text if question.text.endswith("?") else f"{question.text}?"
            system, turn = "", f"Question: {asked} Answer: The answer is"
        elif kind == "chat":
            return tokenizer.encode(self.wording.system + question.text)
        else:
            system, turn = self.wording.system, self._turn(kind, question.text)
        context = ""
        if self.num_contexts:
            joined = "\n\n".join(question.contexts[: self.num_contexts]) + "\n\n"
            rest = sum(len(tokenizer.encode(text)) for text in (system, turn) if text)
            context = tokenizer.decode(tokenizer.encode(joined)[: max(room - rest, 0)])
        if self.template_id and self.num_contexts and not self.short_format:
            template = TEMPLATES[self.template_id - 1]
            return tokenizer.encode(template.format(system=system, context=context, turn=turn))
        return tokenizer.encode(system + context + turn)

    def _turn(self, kind: Kind, question: str) -> str:
        if kind == "dialogue":
            return question
        of_template = self.template_id > 0 and kind in ("short", "long")
        asked = question if of_template else self.wording.asks[kind].replace("{}", question)
        begin = "" if self.template_id else "User: "
        end = "Assistant: The answer is" if kind == "short" else "Assistant:"
        return f"{begin}{asked}\n\n{end}"


def task_of(url: str) -> str:
    """The name of the data set of a file: `nq` of `nq/nq_QA_train.json`."""
    stem = basename(url).rpartition(".")[0]
    return stem.partition("_QA_")[0]


# --- records ----------------------------------------------------------------------------------


def read_question(
    record: dict[str, Any], contexts: Contexts = "given", longform: bool = False
) -> Question:
    """The question of a record. Raises ValueError, which says what is wrong."""
    text = record.get("question")
    if not isinstance(text, str):
        raise ValueError("'question' is not a string")
    if record.get("qa_type") == "multi_choice_qa":
        text = f"{text}\n{_choices(record.get('multichoice_options'))}"
    return Question(text, _contexts(record, contexts), _answers(record, longform))


def _choices(options: Any) -> str:
    if not isinstance(options, list) or not 1 <= len(options) <= 26:
        raise ValueError("'multichoice_options' is not a list of 1 to 26 options")
    lettered = (f"({chr(ord('A') + i)}) {option}" for i, option in enumerate(options))
    return f"Choose one based on the following options: {' '.join(lettered)}"


def _contexts(record: dict[str, Any], kind: Contexts) -> tuple[str, ...]:
    if kind == "retrieved":
        found = record.get("ctxs")
        if not isinstance(found, list) or not all(map(_is_context, found)):
            raise ValueError("'ctxs' is not a list of objects with a title and a text")
        return tuple(_written(one["title"], one["text"]) for one in found)
    if kind == "bert":
        found = record.get("bert_pretrain_corpus_neighbours")
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError("'bert_pretrain_corpus_neighbours' is not a list of texts")
        return tuple(f"source: {one}" for one in found)
    given = record.get("sub-paragraphs", record.get("sub_paragraph", ""))
    title, text = given if isinstance(given, list) and len(given) == 2 else ("", given)
    if not isinstance(title, str) or not isinstance(text, str):
        raise ValueError("'sub-paragraphs' is neither a text nor a list of a title and a text")
    return (_written(title, text),)


def _is_context(one: Any) -> bool:
    return isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("title", "text"))


def _written(title: str, text: str) -> str:
    return f"title: {title}, source: {text}"


def _answers(record: dict[str, Any], longform: bool) -> tuple[str, ...]:
    if longform:
        answer = record.get("longform_answer")
        if not isinstance(answer, str):
            raise ValueError("no 'longform_answer', which --longform-answer asks for")
        return (answer,)
    found = record.get("answers", record.get("answer", []))
    listed = found if isinstance(found, list) else [found]
    return tuple(_answer(one) for one in listed)


def _answer(one: Any) -> str:
    if isinstance(one, dict):
        one = one.get("text")
        one = one.strip() if isinstance(one, str) else one
    if one is None or isinstance(one, dict | list):
        raise ValueError("an answer is neither a text nor an object with a text")
    return str(one)
