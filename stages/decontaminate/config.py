"""Options of `python -m stages.decontaminate`, by the names of Megatron-LM's filter_ngrams.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.collection.options import DocumentsConfig
from trainyard.config import MAX_RANKS, check_at_least, check_at_most, execution, location
from trainyard.errors import ConfigError

TASK_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecontaminateConfig(FolderInShares):
    """Remove from documents what has an n-gram in common with evaluation sets."""

    documents: DocumentsConfig
    output_dir: str = location()
    """Folder or URL for documents-N.jsonl, dropped-N.jsonl and report.json."""
    tasks: tuple[str, ...]
    """Names of evaluation sets. lambada, squad, race, glue, wikitext, nq, natural_questions,
    triviaqa, webqa, drop, coqa and piqa are read in their own format; of another name, the ending
    of the file decides: .tsv, .txt, or JSONL."""
    task_data: tuple[str, ...] = location()
    """For each of --tasks, a file, folder, pattern or URL."""
    mode: Literal["split", "drop"] = "split"
    """split: keep the parts of a document that are far from an n-gram; drop: drop it whole."""
    max_ngram_size: int = 13
    """Words of an n-gram."""
    min_ngram_size: int = 8
    """Least words of an evaluation text; one with fewer words than an n-gram is one itself."""
    key_threshold: int = 10
    """An n-gram that occurs as often in the corpus is a common phrase and stays; 0: none is.
    Occurrences that overlap count, where upstream counts the first of them."""
    remove_char_each_side: int = 200
    """With --mode split: characters to remove on each side of an n-gram, up to the sentence."""
    filter_text_char_len: int = 200
    """With --mode split: a part of no more characters is removed."""
    splits_count: int = 10
    """With --mode split: a document with more parts is dropped."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores. Unset: the number of cores."""
    rank: int | None = execution(None)
    """With --world-size: count the n-grams of this share only, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: add the counts of all shares up and write the output; the
    result equals that of one run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "workers", "world_size", "min_ngram_size", "splits_count")
        check_at_least(self, 0, "key_threshold", "remove_char_each_side", "filter_text_char_len")
        check_at_most(self, MAX_RANKS, "world_size")
        check_at_most(self, 100, "max_ngram_size")
        self.check_rank()
        if self.min_ngram_size > self.max_ngram_size:
            raise ConfigError(
                f"--min-ngram-size {self.min_ngram_size} must be at most --max-ngram-size, "
                f"{self.max_ngram_size}"
            )
        if not self.tasks or len(self.tasks) != len(self.task_data):
            raise ConfigError(
                f"--tasks names {len(self.tasks)} evaluation sets and --task-data "
                f"{len(self.task_data)} places; give one place for each"
            )
        for name in self.tasks:
            if not TASK_NAME.fullmatch(name) or self.tasks.count(name) > 1:
                raise ConfigError(
                    f"--tasks {name}: a name is of letters, digits, _ and ., and is given once"
                )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The documents and the evaluation sets."""
        tasks = dict(zip(self.tasks, self.task_data, strict=True))
        return {
            "input": self.documents.input,
            **{f"task.{name}": (url,) for name, url in tasks.items()},
        }

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the documents that they read."""
        return ("input",)

    def output(self) -> Output | None:
        """A folder, or that of a share."""
        return self.own_folder()
