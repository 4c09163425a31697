"""Contamination of the data sets of one evaluation: for their passports, their rows, and a file of
named documents."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.evaluation.config import ContaminationConfig
from trainyard.evaluation.contamination import Ngrams, named_documents, overlaps, summarize
from trainyard.evaluation.examples import Examples
from trainyard.evaluation.metrics import Row, Summary
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Contamination:
    """Collects what is found of each data set."""

    config: ContaminationConfig
    _lines: list[str] = field(default_factory=list)

    def of(
        self,
        name: str,
        examples: Examples,
        tokenizer: Tokenizer,
        rows: Sequence[Row],
        summary: Summary,
    ) -> dict[str, Any]:
        """What the passport of a data set says. Where each text is an example, its row gets
        `contaminated`, the number of its n-grams in the corpus, and `clean_figures` are those of
        the other examples. The texts of WIKITEXT103 are lines, which are no windows."""
        prefixes = self.config.contamination_corpus
        ngrams = Ngrams(examples.texts(), tokenizer, self.config.contamination_ngram)
        found = overlaps(ngrams, prefixes)
        if self.config.contamination_documents:
            for one in named_documents(found):
                self._lines.append(json.dumps({"set": name, **one}, ensure_ascii=False) + "\n")
        digests = [resolve("contamination_corpus", [prefix]).digest for prefix in prefixes]
        report = {**summarize(ngrams, found), "corpus": {"digest": digest_document(digests)}}
        log.info(
            "%s: %d of %d texts share %d tokens in a row with the corpus",
            *(name, report["num_contaminated"], report["num_examples"], report["ngram"]),
        )
        if len(ngrams.is_short) != len(rows):
            return report
        for row in rows:
            overlap = found.get(row["example"])
            row["contaminated"] = 0 if overlap is None else len(overlap.ngrams)
        clean = [row for row in rows if not row["contaminated"]]
        figures = {
            key: {k: v for k, v in one.items() if k in ("value", "stderr", "count")}
            for key, one in summary.documents(clean).items()
        }
        return {**report, "clean_figures": figures}

    def lines(self) -> str:
        """The text of the file of named documents."""
        return "".join(self._lines)
