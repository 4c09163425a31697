"""Options of `python -m stages.dedup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.collection.options import DocumentsConfig
from trainyard.collection.versions import versions_of
from trainyard.config import MAX_RANKS, also, check_at_least, check_at_most, execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupConfig(FolderInShares):
    """Remove documents that repeat others. Which of them stays follows from their contents, not
    from the order of the input."""

    documents: DocumentsConfig
    output_dir: str = location()
    """Folder or URL for documents-N.jsonl, dropped-N.jsonl, clusters.jsonl and report.json."""
    exact: bool = True
    """Remove documents whose text is the same as that of another."""
    lines: Literal["none", "line", "paragraph", "words"] = "none"
    """Cut lines, paragraphs between blank lines, or runs of words that repeat another of any
    document."""
    min_line_chars: int = 40
    """With --lines line or paragraph: a shorter one stays."""
    min_run_words: int = 50
    """With --lines words: every run of as many words that repeats another is found and cut, but
    for up to 7 words at each end (arXiv:2107.06499)."""
    near: bool = True
    """Remove documents that nearly repeat another, by MinHash and locality-sensitive hashing."""
    normalize: bool = True
    """Compare in lower case and without punctuation; otherwise only runs of blanks are as one."""
    shingle: Literal["words", "chars"] = "words"
    """What a text is cut into."""
    shingle_size: int = 5
    """Words or characters in a shingle."""
    num_permutations: int = also("num_seeds", default=200)
    """Numbers in a signature."""
    num_bands: int = 25
    """Parts of a signature; documents that agree in one are compared. The defaults find 99 % of the
    pairs with a similarity of 0.8."""
    seed: int = 1234
    """Seed of the permutations."""
    jaccard: Literal["union", "min", "max"] = "union"
    """What the common shingles of two documents are divided by: those of both together, of the
    smaller, or of the larger one."""
    jaccard_threshold: float = 0.8
    """Least similarity of duplicates."""
    bucket_threshold: float | None = None
    """Least similarity with which a document leaves a bucket without being compared with others
    of it. Unset: as --jaccard-threshold."""
    heuristic_iter: int = -1
    """Documents that the others of a bucket are compared with; -1: until one is left."""
    keep: Literal["longest", "smallest-hash"] = "longest"
    """Which document of several stays: the longest, of equals the one with the smallest hash."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores. Unset: the number of cores."""
    rank: int | None = execution(None)
    """With --world-size: compute only this share of the fingerprints, from 0. Shares may run at
    the same time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: find duplicates in all of them and write the output; the
    result equals that of one run."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "workers", "world_size", "shingle_size", "num_permutations")
        check_at_least(self, 1, "num_bands", "min_line_chars")
        check_at_least(self, 0, "seed")
        check_at_least(self, 16, "min_run_words")
        check_at_most(self, 10_000, "min_run_words")
        check_at_most(self, MAX_RANKS, "world_size")
        check_at_most(self, 4096, "num_permutations", "shingle_size")
        self.check_rank()
        if not (self.exact or self.near or self.lines != "none"):
            raise ConfigError("--no-exact --no-near --lines none: there is nothing to compare")
        if self.num_permutations % self.num_bands:
            raise ConfigError(
                f"--num-permutations {self.num_permutations} must be a multiple of --num-bands "
                f"{self.num_bands}: each band has as many rows"
            )
        if self.heuristic_iter < -1 or self.heuristic_iter == 0:
            raise ConfigError(
                f"--heuristic-iter must be at least 1, or -1 for all, got {self.heuristic_iter}"
            )
        for name in ("jaccard_threshold", "bucket_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be above 0 and at most 1, got {value}")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The documents."""
        return {"input": self.documents.input}

    def versions(self) -> dict[str, str]:
        """Of the library that hashes."""
        return versions_of("xxhash")

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the documents that they read."""
        return ("input",)

    def output(self) -> Output | None:
        """A folder, or that of a share."""
        return self.own_folder()
