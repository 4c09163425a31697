"""Options of `python -m stages.score`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.classifiers.installed import version_of
from trainyard.collection.options import DocumentsConfig
from trainyard.config import MAX_RANKS, check_at_least, check_at_most, execution, location
from trainyard.errors import ConfigError

NGRAMS, ANNOTATED = "ngrams", "annotated"
ATTRIBUTE = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig(FolderInShares):
    """Score documents by a classifier, and keep the fraction with the lowest scores.

    A score is the probability, from 0 to 1, that a text is toxic, or whatever else the classifier
    was trained on. An empty text has none, and --keep-fraction drops it."""

    documents: DocumentsConfig
    output_dir: str = location()
    """Folder or URL for documents-N.jsonl, dropped-N.jsonl and report.json."""
    classifier: str
    """ngrams: logistic regression over words and pairs of words, trained on --classifier-data;
    annotated: the scores that the documents have already, made elsewhere; or a classifier of an
    installed package, by its entry point in trainyard.classifiers."""
    classifier_data: str | None = location(None)
    """Of ngrams: a JSONL file whose lines have a text in `text`, and in `label` 1 for a toxic one,
    0 for another, or a probability."""
    attribute: str = "toxicity"
    """Name of the score: a document has it in the object `score`."""
    keep_fraction: float | None = None
    """Keep this fraction of the documents, those with the lowest scores; unset: all."""
    prompt_key: str = "prompt"
    """Key of the prompt that a text continues, where it has one: report.json then has the expected
    maximum toxicity and the toxicity probability over the prompts."""
    prompt_path: str | None = location(None)
    """JSONL file of the prompts with a toxicity of their own, in the layout of RealToxicityPrompts;
    report.json then has these measures for toxic and other prompts too. A file of other prompts is
    refused after the scoring."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores; each loads the classifier. Unset: the
    number of cores."""
    rank: int | None = execution(None)
    """With --world-size: compute only this share of the scores, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: keep and report by the scores of all of them; the result
    equals that of one run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "workers", "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        self.check_rank()
        if self.classifier == NGRAMS and self.classifier_data is None:
            raise ConfigError(
                "--classifier ngrams needs --classifier-data, a JSONL file of texts with labels: "
                "no trained weights come with it"
            )
        if self.classifier != NGRAMS and self.classifier_data is not None:
            raise ConfigError(
                f"--classifier-data trains --classifier {NGRAMS}, not {self.classifier}; leave it "
                "out"
            )
        if not ATTRIBUTE.fullmatch(self.attribute):
            raise ConfigError(
                f"--attribute {self.attribute!r}: a name is of letters, digits, _, - and ."
            )
        if self.keep_fraction is not None and not 0 < self.keep_fraction < 1:
            raise ConfigError(
                f"--keep-fraction must be above 0 and below 1, got {self.keep_fraction}; leave it "
                "out to keep all documents"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The documents, the classifier's examples and the prompts."""
        files = {"classifier_data": self.classifier_data, "prompt_path": self.prompt_path}
        named = {name: () if url is None else (url,) for name, url in files.items()}
        return {"input": self.documents.input, **named}

    def versions(self) -> dict[str, str]:
        """Of the package that scores."""
        own = self.classifier in (NGRAMS, ANNOTATED)
        return {} if own else version_of(self.classifier)

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the documents that they read."""
        return ("input",)

    def output(self) -> Output | None:
        """A folder, or that of a share."""
        return self.own_folder()
