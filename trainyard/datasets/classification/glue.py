"""MNLI and QQP of GLUE (arXiv:1804.07461): pairs of texts with a class, tab-separated, without
quoting, below a line of headings. The columns are those that Megatron-LM's tasks read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainyard.artifacts.inputs import read_checked
from trainyard.datasets.classification.texts import clean_text
from trainyard.errors import DataError

GlueName = Literal["MNLI", "QQP"]


class Pair(NamedTuple):
    """Two texts, cleaned, and the number of their class."""

    first: str
    second: str
    label: int


class _NoPairError(ValueError):
    """A line of QQP that Megatron-LM skips as well."""


@dataclass(frozen=True, slots=True)
class GlueSet:
    """How the lines of a data set are read."""

    classes: tuple[str, ...]
    """In the order of their numbers."""
    read: Callable[[Sequence[str]], tuple[str, str, str]]
    """Columns to two texts and a class; ValueError says what is wrong."""


def _mnli(columns: Sequence[str]) -> tuple[str, str, str]:
    if len(columns) < 10:
        raise ValueError(f"{len(columns)} columns, and MNLI has at least 10")
    is_test = len(columns) == 10  # without labels
    return columns[8], columns[9], "contradiction" if is_test else columns[-1].strip()


def _qqp(columns: Sequence[str]) -> tuple[str, str, str]:
    if len(columns) == 3:  # the test set, without labels
        return columns[1], columns[2], "0"
    if len(columns) != 6:
        raise _NoPairError(f"{len(columns)} columns, and QQP has 6")
    return columns[3], columns[4], columns[5].strip()


SETS: dict[GlueName, GlueSet] = {
    "MNLI": GlueSet(("contradiction", "entailment", "neutral"), _mnli),
    "QQP": GlueSet(("0", "1"), _qqp),
}


def glue_name(url: str) -> GlueName | None:
    """The data set of a file by its headings; None for another file."""
    headings = read_checked(url).split(b"\n", 1)[0].decode(errors="replace").strip().split("\t")
    if "sentence1" in headings and "sentence2" in headings:
        return "MNLI"
    return "QQP" if "question1" in headings and "question2" in headings else None


def read_pairs(url: str, name: GlueName) -> list[Pair]:
    """The pairs of a file. Skips lines of QQP that are no pair or have an empty text, as
    Megatron-LM does. DataError names a line that is wrong."""
    kind = SETS[name]
    try:
        lines = read_checked(url).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{url}: byte {error.start} is not UTF-8") from None
    pairs = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            first, second, label = kind.read(line.rstrip("\r").split("\t"))
            if label not in kind.classes:
                raise ValueError(f"class {label!r} is not one of {', '.join(kind.classes)}")
        except _NoPairError:
            continue
        except ValueError as fault:
            raise DataError(f"{url}: line {number}: {fault}") from None
        pair = Pair(
            clean_text(first.strip()), clean_text(second.strip()), kind.classes.index(label)
        )
        if name == "QQP" and not (pair.first and pair.second):
            continue
        pairs.append(pair)
    if not pairs:
        raise DataError(f"{url}: no pair of {name} below the headings")
    return pairs
