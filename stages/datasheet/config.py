"""Options of `python -m stages.datasheet`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.collection.versions import versions_of
from trainyard.config import check_at_least, check_at_most, execution, location
from trainyard.corpus.formats.bounds import MAX_DOCUMENT_BYTES, check_bound
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetConfig:
    """Write the datasheet of a corpus: its size, sources, languages and licences, what each rule
    removed with samples, and how often documents were repeated (Gebru et al. 2018,
    arXiv:1803.09010)."""

    documents: tuple[str, ...] = location()
    """Files, folders, patterns or URLs of the finished documents."""
    folders: tuple[str, ...] = location(())
    """Outputs of collect, clean, dedup, decontaminate and mix, in the order in which they ran."""
    output_prefix: str = location()
    """Where to write: PREFIX.html and PREFIX.json."""
    title: str = "corpus"
    """Name of the corpus."""
    licenses: tuple[str, ...] = ()
    """Licences of the sources, as text; those that documents name under the key `license` are
    counted besides."""
    json_key: str = "text"
    """Key of the text."""
    num_samples: int = 3
    """Removed documents to show for each reason."""
    num_identified: int = 2000
    """Documents whose language is identified, drawn by a hash of their text; 0: none."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Largest document, in bytes after decompression; a larger one is an error."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores. Unset: the number of cores."""

    def __post_init__(self) -> None:
        if not self.documents:
            raise ConfigError("--documents names no file")
        if not self.json_key:
            raise ConfigError("--json-key is empty; name the key of the text, such as text")
        check_bound(self.max_document_bytes)
        check_at_least(self, 0, "num_samples", "num_identified")
        check_at_most(self, 100, "num_samples")
        check_at_most(self, 1_000_000, "num_identified")
        check_at_least(self, 1, "workers")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The documents and the folders."""
        return {"input": self.documents, "folders": self.folders}

    def versions(self) -> dict[str, str]:
        """Of the libraries that draw documents and identify languages."""
        return versions_of("xxhash", *(("py3langid",) if self.num_identified else ()))

    def output(self) -> Output | None:
        """A prefix."""
        return Output.prefix(self.output_prefix)
