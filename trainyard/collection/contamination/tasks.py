"""Readers of evaluation sets: the texts of one, whose n-grams must not be trained on.

Upstream looks for the questions alone (filter_ngrams.py of Megatron-LM's tools/openwebtext)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES
from trainyard.errors import ConfigError, DataError

QUESTION_KEYS = ("question", "goal", "text", "prompt", "query", "ctx", "sentence", "problem")
"""Keys of the text of an item in JSONL, the first that it has; a list is several texts."""
GLUE_COLUMNS = ("sentence", "sentence1", "sentence2", "question", "question1", "question2")

Reader = Callable[[bytes, str], Iterator[str]]


def _jsonl(data: bytes, where: str) -> Iterator[str]:
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            yield from _of_item(_parsed(line, f"{where}: line {number}"), f"{where}: line {number}")


def _of_item(item: Any, where: str) -> Iterator[str]:
    if not isinstance(item, dict):
        raise DataError(f"{where}: not a JSON object")
    key = next((key for key in QUESTION_KEYS if key in item), None)
    if key is None:
        if "questions" in item:  # of CoQA and RACE
            yield from _strings(item["questions"], where)
            return
        raise DataError(
            f"{where}: none of the keys {' '.join(QUESTION_KEYS)}, only {sorted(item)[:8]}; "
            "rename the key of its text to one of them"
        )
    value = item[key]
    if isinstance(value, dict) and isinstance(value.get("text"), str):  # Natural Questions
        value = value["text"]
    yield from _strings(value, where)


def _strings(value: Any, where: str) -> Iterable[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: neither a text nor a list of texts")
    return texts


def _squad(data: bytes, where: str) -> Iterator[str]:
    try:
        for article in _parsed(data, where)["data"]:
            for paragraph in article["paragraphs"]:
                for item in paragraph["qas"]:
                    yield from _strings(item["question"], where)
    except (KeyError, TypeError) as error:
        raise DataError(f"{where}: not a file of SQuAD (no {error})") from error


def _tsv(data: bytes, where: str) -> Iterator[str]:
    text = _decoded(data, where)
    header, *lines = (line.rstrip("\r").split("\t") for line in text.split("\n"))
    columns = [i for i, name in enumerate(header) if name in GLUE_COLUMNS]
    if not columns:
        raise DataError(
            f"{where}: its first line names none of the columns {' '.join(GLUE_COLUMNS)}"
        )
    for row in lines:
        yield from (row[i] for i in columns if i < len(row))


def _lines(data: bytes, where: str) -> Iterator[str]:
    yield from _decoded(data, where).splitlines()


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _parsed(data: bytes, where: str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass  # it refuses what Python's json takes, such as NaN
    try:
        return json_text.loads(data)
    except ValueError as error:
        raise DataError(f"{where}: not a JSON document ({error})") from error


READERS: dict[str, Reader] = {
    "jsonl": _jsonl,
    "lambada": _jsonl,
    "race": _jsonl,
    "squad": _squad,
    "glue": _tsv,
    "wikitext": _lines,
    **dict.fromkeys(("nq", "natural_questions", "triviaqa", "webqa", "drop"), _jsonl),
    **dict.fromkeys(("coqa", "piqa"), _jsonl),
}
"""By the name of a task; of another, the ending of its file decides."""

BY_ENDING = {".tsv": _tsv, ".txt": _lines, ".tokens": _lines}


def read_task(name: str, files: Sequence[str]) -> Iterator[str]:
    """The texts of an evaluation set. files: what its URL names, such as all files of a folder."""
    for url in files:
        size_bytes = store.info(url).size_bytes
        if size_bytes > MAX_DOCUMENT_BYTES:
            raise ConfigError(
                f"--task-data {url} has {size_bytes} bytes, and an evaluation set is read whole: "
                f"at most {MAX_DOCUMENT_BYTES}; split it"
            )
        ending = url[url.rfind(".") :]
        reader = READERS.get(name) or BY_ENDING.get(ending, _jsonl)
        yield from reader(store.read_bytes(url), url)
