"""Instruction data of any usual layout as records of InstructRetro (`questions`), whose prompts any
tokenizer can encode.

    {"question": "User: ...\\n\\nAssistant:", "answer": "..."}       a turn of a conversation
    {"question": ..., "answers": [...], "sub-paragraphs": [title, text]}     or "ctxs"

Knows no files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard.datasets.fine_tuning.questions import CHATS, Contexts, read_question
from trainyard.datasets.fine_tuning.records import Message, parse_messages

ASSISTANT = "assistant"

Converted = list[dict[str, Any]]


def converted(record: dict[str, Any], task: str) -> Converted:
    """The records of one record for a data set of that name: of a conversation one for each turn of
    the assistant. Raises ValueError, which says what is wrong."""
    is_chat = task in CHATS
    if "question" not in record or "messages" in record:
        if not is_chat:
            raise ValueError(
                f"a conversation, which InstructRetro lays out only in data sets named "
                f"{', '.join(CHATS)}, not {task}"
            )
        turns = list(turns_of(parse_messages(record)))
        if not turns:
            raise ValueError("a conversation without a turn of the assistant")
        return turns
    if is_chat:
        raise ValueError(f"a question, and {task} has conversations; name the data set otherwise")
    found = question_of(record)
    kind: Contexts = "retrieved" if "ctxs" in found else "given"
    question = read_question(found, kind)
    if not question.answers:
        raise ValueError("a question without an answer: no 'answers' or 'answer', or no entry")
    return [found]


def turns_of(messages: list[Message]) -> Iterator[dict[str, str]]:
    """Each turn of the assistant, after all before it."""
    before = ""
    for message in messages:
        role, text = message["role"], message["content"]
        name = role.replace("_", " ").capitalize()
        if role == ASSISTANT:
            yield {"question": f"{before}{name}:", "answer": text}
        before += f"{name}: {text}\n\n"


def question_of(record: dict[str, Any]) -> dict[str, Any]:
    """A question under InstructRetro's keys: those of SQuAD, TriviaQA and DPR in the layouts of
    Hugging Face and of DPR have others."""
    found = {"question": record["question"], "answers": _answers(record)}
    if isinstance(context := record.get("context"), str):
        found["sub-paragraphs"] = [record.get("title", ""), context]
    elif isinstance(contexts := record.get("positive_ctxs"), list) and "ctxs" not in record:
        found["ctxs"] = contexts
    mine = ("id", "ctxs", "sub-paragraphs", "sub_paragraph", "longform_answer", "qa_type")
    kept = (*mine, "multichoice_options", "bert_pretrain_corpus_neighbours")
    return found | {key: record[key] for key in kept if key in record}


def _answers(record: dict[str, Any]) -> Any:
    found = record.get("answers", record.get("answer", []))
    if isinstance(found, dict) and isinstance(found.get("text"), list):  # SQuAD
        return found["text"]
    if isinstance(found, dict) and isinstance(found.get("value"), str):  # TriviaQA
        aliases = found.get("aliases") or []
        return list(dict.fromkeys([found["value"], *aliases]))
    return found if isinstance(found, list) else [found]
