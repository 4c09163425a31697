"""Options of `python -m stages.collect`, and the fingerprint of the environment it reads."""

from __future__ import annotations

import hashlib
import os
import site
import sys
from dataclasses import dataclass, field, fields
from typing import Literal

from trainyard.artifacts.folder_in_shares import FolderInShares
from trainyard.artifacts.output import Output
from trainyard.collection.fetch.options import FetchConfig
from trainyard.collection.versions import versions_of
from trainyard.config import (
    MAX_RANKS,
    check_above_zero,
    check_at_least,
    check_at_most,
    differing,
    execution,
    flag,
    location,
)
from trainyard.corpus.formats.bounds import check_bound
from trainyard.errors import ConfigError

OURSELVES = "trainyard"
Source = Literal["python", "wikipedia", "warc", "html", "json", "fetch"]
PYTHON: Source = "python"
WIKIPEDIA: Source = "wikipedia"
WARC: Source = "warc"
HTML: Source = "html"
JSON: Source = "json"
FETCH: Source = "fetch"

OPTIONS_OF: dict[Source, tuple[str, ...]] = {
    PYTHON: ("max_size_mb", "num_shards", "conversations"),
    WIKIPEDIA: ("input", "multistream_index", "namespaces"),
    WARC: ("input", "html_timeout_seconds"),
    HTML: ("input", "html_timeout_seconds"),
    JSON: ("input", "json_key", "on_bad_line"),
    FETCH: ("input", *(one.name for one in fields(FetchConfig))),
}
"""Options that only some sources have."""

OF_UNITS = ("max_document_bytes", "num_samples", "rank", "world_size")
"""Options of all sources but Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig(FolderInShares):
    """Collect documents: from a Wikipedia dump, WARC files of a crawl, HTML, JSON, or, without any
    input, from the documentation that comes with Python. Or fetch pages for WARC files."""

    output_dir: str = location()
    """Folder or URL for documents-N.jsonl, dropped-N.jsonl and report.json; of python:
    train-00000.jsonl and so on, and heldout.txt."""
    source: Source = PYTHON
    """What to read. wikipedia: MediaWiki XML dumps, .xml or .xml.bz2. warc: WARC and WET files,
    also those of fetch. html: folders of .html files. json: an object with the text a line. fetch:
    lists of URLs, .txt or .jsonl with the key url, whose pages become pages-N.warc.gz."""
    input: tuple[str, ...] = location(())
    """Files, folders, patterns or URLs to read; not of python."""
    multistream_index: tuple[str, ...] = location(())
    """wikipedia: the indices of multistream dumps, one for each file of --input, in order. Units
    are cut at their offsets, and their pages are counted. Unset: streams are found without."""
    namespaces: tuple[int, ...] = (0,)
    """wikipedia: namespaces of pages to keep; 0 is articles."""
    json_key: str = "text"
    """json: key of the text. A document keeps all its other keys."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """json: what to do about a line that is not a document. skip: count it among the dropped."""
    html_timeout_seconds: float = 30.0
    """warc, html: longest time for the text of one page; a page that takes longer is dropped."""
    max_document_bytes: int = 32 << 20
    """Largest page or record, after decompression; a larger one is dropped."""
    num_samples: int = 20
    """Documents to show for each reason in report.json."""
    max_size_mb: float = 12.0
    """python: stop at about this many megabytes (10^6 bytes) of text."""
    num_shards: int = 4
    """python: number of training files."""
    conversations: bool = False
    """python: write questions about functions and classes with their answers, for stages.finetune,
    instead of documents; those held out are in heldout.jsonl."""
    fetch: FetchConfig = field(default_factory=FetchConfig)
    environment: str = ""
    """python: fingerprint of this Python and its packages; unset: computed."""
    workers: int | None = execution(None)
    """Number of processes, at most the number of cores. Unset: the number of cores."""
    rank: int | None = execution(None)
    """With --world-size: make only this share of the output, from 0. Shares may run at the same
    time, on different machines."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""

    def __post_init__(self) -> None:
        if self.max_size_mb <= 0:
            raise ConfigError(f"--max-size-mb must be positive, got {self.max_size_mb}")
        if not 1 <= self.num_shards <= 99999:
            raise ConfigError(f"--num-shards must be from 1 to 99999, got {self.num_shards}")
        self._check_source()
        check_bound(self.max_document_bytes)
        check_above_zero(self, "html_timeout_seconds")
        check_at_least(self, 0, "num_samples")
        check_at_most(self, 10_000, "num_samples")
        check_at_least(self, 1, "workers", "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        self.check_rank()
        if self.source == PYTHON and not self.environment:
            object.__setattr__(self, "environment", environment_fingerprint())

    def _check_source(self) -> None:
        """Refuse options of other sources, and a source without input."""
        ours = OPTIONS_OF[self.source] + (() if self.source == PYTHON else OF_UNITS)
        others = {name for names in OPTIONS_OF.values() for name in names} | set(OF_UNITS)
        for name in differing(self).keys() & others:
            if name not in ours:
                of = [source for source, names in OPTIONS_OF.items() if name in names]
                raise ConfigError(
                    f"{flag(name)} is not for --source {self.source}; "
                    f"it is for {', '.join(of) or 'all others'}"
                )
        if self.source == PYTHON:
            return
        if self.source == FETCH and self.world_size is not None:
            raise ConfigError(
                "--world-size is not for --source fetch, whose hosts are asked one at a time; to "
                "fetch on several machines, give each a list with other hosts"
            )
        if not self.input:
            raise ConfigError(f"--source {self.source} needs --input, the files to read")
        if not self.json_key:
            raise ConfigError("--json-key is empty; name the key of the text, such as text")
        if not self.namespaces:
            raise ConfigError("--namespaces names none; 0 is articles")

    def can_be_shared(self) -> bool:
        """Whether there are files to divide."""
        return self.source not in (PYTHON, FETCH)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The files to read; of python none, whose `environment` names what the stage reads."""
        return {"input": self.input, "multistream_index": self.multistream_index}

    def versions(self) -> dict[str, str]:
        """Of the libraries that decide what the text of a page is."""
        needed = {
            WARC: ("trafilatura", "lxml", "warcio"),
            HTML: ("trafilatura", "lxml"),
            FETCH: ("tld",),
        }
        return versions_of(*needed.get(self.source, ()), extra="collect")

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the files that they read."""
        return ("input",)

    def output(self) -> Output | None:
        """A folder, or that of a share."""
        return self.own_folder()


def site_folders() -> list[str]:
    """The folders of installed packages, in the order in which Python searches them."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders = [*folders, site.getusersitepackages()]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def environment_fingerprint() -> str:
    """Hash of the Python build and of the names and versions of all installed packages but ours.

    Read from the names of the .dist-info folders: a hundredth of a second."""
    installed = set()
    for folder in site_folders():
        for name in os.listdir(folder):
            stem, ending = os.path.splitext(name)
            if ending in (".dist-info", ".egg-info") and stem.partition("-")[0] != OURSELVES:
                installed.add(stem.lower())
    facts = "\n".join([sys.version, *sorted(installed)])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]
