"""RACE: questions about an article, each with options of which one is right (arXiv:1704.04683).

A folder of .txt files. Each line of a file is a JSON object: article, questions, options (a list
for each question), answers (a letter for each question)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.inputs import read_checked
from trainyard.artifacts.urls import join
from trainyard.datasets.classification.texts import clean_text
from trainyard.errors import DataError


@dataclass(frozen=True, slots=True)
class RaceQuestion:
    """A question about an article."""

    article: str
    question: str
    options: tuple[str, ...]
    answer: int
    """Index of the right option."""

    def with_option(self, index: int) -> str:
        """The question answered by an option, cleaned: in place of its "_", or behind it."""
        option = self.options[index]
        if "_" in self.question:
            return clean_text(self.question.replace("_", option))
        return clean_text(f"{self.question} {option}")


def read_race(folder: str) -> list[RaceQuestion]:
    """The questions of a folder such as RACE/dev/middle, by the names of its files. DataError names
    a file that is not RACE's."""
    names = sorted(name for name in store.list_folder(folder) if name.endswith(".txt"))
    if not names:
        raise DataError(
            f"{folder}: no .txt file, and RACE has one for each article; name a folder such as "
            "RACE/dev/middle"
        )
    return [question for name in names for question in _read_file(join(folder, name))]


def _read_file(url: str) -> list[RaceQuestion]:
    found = []
    for number, line in enumerate(read_checked(url).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found += _questions(json_text.loads(line))
        except ValueError as fault:
            raise DataError(f"{url}: line {number}: {fault}") from None
    return found


def _questions(record: Any) -> list[RaceQuestion]:
    if not isinstance(record, dict) or not isinstance(record.get("article"), str):
        raise ValueError("not an object with a string 'article'")
    questions, options, answers = (
        record.get(key, []) for key in ("questions", "options", "answers")
    )
    for key, found in (("questions", questions), ("answers", answers)):
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError(f"{key!r} is not a list of strings")
    if not isinstance(options, list) or not len(options) == len(questions) == len(answers):
        raise ValueError("'questions', 'options' and 'answers' are not lists of one length")
    article = clean_text(record["article"])
    return [_question(article, *one) for one in zip(questions, options, answers, strict=True)]


def _question(article: str, question: str, options: Any, answer: str) -> RaceQuestion:
    is_list = isinstance(options, list) and all(isinstance(one, str) for one in options)
    if not is_list or not 2 <= len(options) <= 26:
        raise ValueError("the options of a question are not a list of 2 to 26 strings")
    index = ord(answer) - ord("A") if len(answer) == 1 else -1
    if not 0 <= index < len(options):
        raise ValueError(f"answer {answer!r} is no letter of {len(options)} options, from A")
    return RaceQuestion(article, question, tuple(options), index)
