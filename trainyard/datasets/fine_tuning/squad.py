"""SQuAD's layout (arXiv:1606.05250): articles with paragraphs with questions, in one document.

{"data": [{"title": ..., "paragraphs": [{"context": ...,
           "qas": [{"question": ..., "answers": [{"text": ...}]}]}]}]}"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainyard import json_text
from trainyard.artifacts.inputs import read_checked
from trainyard.errors import DataError


def squad_records(url: str) -> list[dict[str, Any]] | None:
    """The questions of a file as records of `questions.read_question`, with their paragraph as the
    given context; None for a file of another layout. DataError for a damaged one."""
    if not url.endswith(".json"):
        return None
    try:
        document = json_text.loads(read_checked(url))
    except ValueError:
        return None  # perhaps a record a line
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        return None
    records = list(_records(document["data"], url))
    if not records:
        raise DataError(f"{url}: SQuAD's layout without a question")
    return records


def _records(articles: list[Any], url: str) -> Iterator[dict[str, Any]]:
    for number, article in enumerate(articles):
        where = f"{url}: article {number}, from 0"
        title = _of(article, where).get("title", "")
        for paragraph in _listed(article, "paragraphs", where):
            context = _of(paragraph, where).get("context")
            if not isinstance(context, str):
                raise DataError(f"{where}: a paragraph has no string 'context'")
            for asked in _listed(paragraph, "qas", where):
                given = _of(asked, where)
                yield {
                    "question": given.get("question"),
                    "answers": given.get("answers", []),
                    "sub-paragraphs": [title, context],
                }


def _of(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise DataError(f"{where}: not an object, as SQuAD's layout has one there")
    return found


def _listed(found: dict[str, Any], key: str, where: str) -> list[Any]:
    if not isinstance(found.get(key), list):
        raise DataError(f"{where}: no list {key!r}")
    listed: list[Any] = found[key]
    return listed
