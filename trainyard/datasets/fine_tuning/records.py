"""The records of instruction data: conversations in the shapes that are usual, and questions.

    {"messages": [{"role", "content"}, ...]}             Megatron-LM, OpenAI
    {"conversations": [{"from", "value"}, ...]}          ShareGPT: human, gpt, system
    {"instruction", "input", "output"}                   Alpaca
    {"prompt", "response"}                               Dolly, HH-RLHF
    {"question", "answers" or "answer", "ctxs", ...}     InstructRetro (`questions`)

Standard library only."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Message = dict[str, Any]
"""A turn: "role", "content", and other keys of the line."""

QuestionRecord = dict[str, Any]

Record: TypeAlias = list[Message] | QuestionRecord

SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT, and what they are called elsewhere."""


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError, which says what is wrong."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} of the line") from None
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {type(record).__name__}")
    return record


def parse_record(line: bytes) -> Record:
    """The messages of a line, or its question. Raises ValueError, which says what is wrong."""
    record = parse_object(line)
    if "question" in record and "messages" not in record:
        return record
    return parse_messages(record)


def parse_messages(record: dict[str, Any]) -> list[Message]:
    """The messages of a conversation. Raises ValueError, which says what is wrong."""
    if "messages" in record:
        return _checked(record["messages"], "messages")
    if "conversations" in record:
        return _checked(_of_sharegpt(record["conversations"]), "conversations")
    for keys in (("instruction", "output"), ("prompt", "response")):
        if all(key in record for key in keys):
            return _of_pair(record, *keys)
    raise ValueError(
        f"no key 'messages', 'question', 'conversations', 'instruction' with 'output', or "
        f"'prompt' with 'response' among its {sorted(record)[:8]}"
    )


def _checked(messages: Any, key: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key!r} is not a list of messages, or is empty")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is not an object with a role")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"the content of message {number} is not a string")
    return messages


def _of_sharegpt(turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns
    return [
        {"role": SHAREGPT.get(role, role), "content": turn.get("value")}
        if isinstance(turn, dict) and isinstance(role := turn.get("from"), str)
        else turn
        for turn in turns
    ]


def _of_pair(record: dict[str, Any], asked: str, answered: str) -> list[Message]:
    for key in (asked, answered, "input"):
        if not isinstance(record.get(key, ""), str):
            raise ValueError(f"{key!r} is not a string")
    more = record.get("input", "") if asked == "instruction" else ""
    user = f"{record[asked]}\n\n{more}" if more else record[asked]
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": record[answered]},
    ]


def split_conversations(messages: list[Message]) -> list[list[Message]]:
    """The conversations of a line: a system turn begins a new one."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations
