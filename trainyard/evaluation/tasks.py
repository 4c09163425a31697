"""The table of tasks: what each makes of a data set. Blocks of examples are scored by the copies of
the model in turn, and kept, so that a killed evaluation goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.evaluation.choices import open_choices
from trainyard.evaluation.config import EvaluationConfig, QuestionConfig
from trainyard.evaluation.examples import Examples
from trainyard.evaluation.lambada import open_passages
from trainyard.evaluation.metrics import Row
from trainyard.evaluation.perplexity import open_text
from trainyard.evaluation.questions import open_questions
from trainyard.evaluation.scoring import Scorer
from trainyard.parallel.groups import ProcessGroups, broadcast_object, gather_objects
from trainyard.progress import Progress
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

BLOCK = 64
"""Examples that are scored and kept together, whatever the ranks and the batch size."""

ProgressOf = Callable[[int, str, int], AbstractContextManager[Progress]]
"""Opens the progress over this many examples, of a unit, of which some are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated, on what."""

    scorer: Scorer
    tokenizer: Tokenizer
    path: str
    """URL of the data."""
    config: EvaluationConfig
    questions: QuestionConfig


def _text(subject: Subject) -> Examples:
    return open_text(subject.path, subject.config, subject.scorer, subject.tokenizer)


def _passages(subject: Subject) -> Examples:
    return open_passages(subject.path, subject.config, subject.scorer, subject.tokenizer)


def _choices(subject: Subject) -> Examples:
    return open_choices(subject.path, subject.config, subject.scorer, subject.tokenizer)


def _questions(subject: Subject) -> Examples:
    return open_questions(
        subject.path, subject.config, subject.questions, subject.scorer, subject.tokenizer
    )


TASKS: dict[str, Callable[[Subject], Examples]] = {
    "WIKITEXT103": _text,
    "LAMBADA": _passages,
    "MULTIPLE-CHOICE": _choices,
    **dict.fromkeys(("nq", "triviaqa", "squad", "QA"), _questions),
}


class Units(Protocol):
    """Keeps the rows of finished blocks, by name."""

    def publish(self, key: str, document: dict[str, Any]) -> None:
        """Keep a document."""

    def published(self, key: str) -> dict[str, Any] | None:
        """The document of an earlier, killed run; None without one."""


class NoUnits:
    """Keeps nothing: for an evaluation that writes nothing."""

    def publish(self, key: str, document: dict[str, Any]) -> None:
        """Nothing."""

    def published(self, key: str) -> dict[str, Any] | None:
        """Nothing."""


def score_all(
    examples: Examples, name: str, units: Units, groups: ProcessGroups, progress_of: ProgressOf
) -> list[Row]:
    """The rows of all examples, in order, on all ranks. name: of the data set among others."""
    blocks = [range(i, min(i + BLOCK, len(examples))) for i in range(0, len(examples), BLOCK)]
    rows: dict[int, list[Row]] = {}
    if groups.rank == 0:
        for number in range(len(blocks)):
            if (kept := units.published(_key(name, number))) is not None:
                rows[number] = kept["rows"]
        if rows:
            log.info("%s: going on; blocks_done=%d blocks=%d", name, len(rows), len(blocks))
    done = broadcast_object(set(rows), groups.world)
    todo = [number for number in range(len(blocks)) if number not in done]
    own = todo[groups.dp_rank :: groups.dims.dp]
    num_done = sum(len(blocks[number]) for number in done)
    total = num_done + sum(len(blocks[number]) for number in own)
    is_first_of_copy = groups.tp_rank == 0 and groups.pp_rank == 0
    with progress_of(total, examples.unit, num_done) as progress:
        for number in own:
            found = examples.score(blocks[number])
            if is_first_of_copy:
                rows[number] = found
                units.publish(_key(name, number), {"rows": found})
            progress.update(len(blocks[number]))
    for other in gather_objects(rows, groups.world):
        rows |= other
    return [row for number in range(len(blocks)) for row in rows[number]]


def _key(name: str, number: int) -> str:
    return f"{name}-{number:07d}"
