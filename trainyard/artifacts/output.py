"""Outputs of stages: a folder, or a prefix as for Megatron's token files. Pure names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainyard.artifacts.urls import (
    basename,
    canonical,
    canonical_each,
    check_relative,
    join,
    parent,
)
from trainyard.errors import ConfigError

MANIFEST = "manifest.json"
WORK = ".work"
CLAIM = "claim.json"
PARTS = ".parts"
"""Ending of the list of the parts of a virtual dataset (`parts_list`)."""

FINAL_NAMES = "final-"
"""Prefix of the files in a work folder that list the final names a run started to write."""


def is_housekeeping(name: str) -> bool:
    """True for manifests, claims and unfinished work, which are next to an artifact's files."""
    folders, _, file = name.rpartition("/")
    is_own = any(file == own or file.endswith("." + own) for own in (MANIFEST, CLAIM))
    return is_own or any(folder.endswith(WORK) for folder in folders.split("/"))


@dataclass(frozen=True, slots=True)
class Output:
    """The URLs of an artifact, its manifest, claim and work folder.

    directory D:  D/NAME, D/manifest.json, D/.work/, D/.claim.json
    prefix P:     PNAME, P.manifest.json, P.work/, P.claim.json"""

    url: str
    is_prefix: bool
    names: tuple[str, ...] = ()
    """Suffixes of the files and folders that a run may write or remove after the prefix. Empty: not
    known, so any suffix that starts with '.' or '_'."""

    @staticmethod
    def directory(url: str) -> Output:
        """An artifact that is a folder."""
        return Output(_checked(url).rstrip("/") or "/", is_prefix=False)

    @staticmethod
    def prefix(url: str, names: Iterable[str] = ()) -> Output:
        """An artifact whose files share a prefix: `tokens/corpus` with `_text_document.bin`."""
        if _checked(url).endswith("/"):
            raise ConfigError(f"{url}: an output prefix ends in a name, not in '/'")
        return Output(url, is_prefix=True, names=tuple(names))

    @property
    def folder_url(self) -> str:
        """The folder that holds all files of this output."""
        return parent(self.url) if self.is_prefix else self.url

    @property
    def manifest_url(self) -> str:
        """Written last; an output without it does not exist."""
        return f"{self.url}.{MANIFEST}" if self.is_prefix else join(self.url, MANIFEST)

    @property
    def claim_url(self) -> str:
        """Held by the run that is writing."""
        return f"{self.url}.{CLAIM}" if self.is_prefix else join(self.url, f".{CLAIM}")

    @property
    def work_url(self) -> str:
        """Kept by a killed run, removed by a finished one."""
        return f"{self.url}.work" if self.is_prefix else join(self.url, WORK)

    def first_written(self, urls: Sequence[str]) -> str | None:
        """The first of `urls` at which a run may write, replace or remove a file."""
        written = self.written_urls() if self.is_prefix else [self.url]
        exact = frozenset(canonical_each(written))
        begins = tuple(url.rstrip("/") + "/" for url in exact)
        if self.is_prefix and not self.names:
            begins = (canonical(self.url) + ".", canonical(self.url) + "_")
        for url, spelled in zip(urls, canonical_each(urls), strict=True):
            if spelled in exact or spelled.startswith(begins):
                return url
        return None

    def is_matched_by(self, pattern: str) -> bool:
        """Whether a pattern matches a file that a run may write."""
        whole = PurePosixPath(canonical(pattern))
        urls = self.written_urls() if self.names else ()
        return any(PurePosixPath(canonical(url)).match(str(whole)) for url in urls)

    def written_urls(self) -> list[str]:
        """For a prefix: every file and folder that a run may write or remove."""
        own = [self.manifest_url, self.claim_url, self.work_url]
        return [*own, *(self.file_url(name) for name in self.names)]

    def file_url(self, name: str) -> str:
        """URL of the file of that name."""
        return (
            self.url + check_relative(name)
            if self.is_prefix
            else join(self.url, check_relative(name))
        )


def _checked(url: str) -> str:
    if not url.strip() or "\0" in url:
        raise ConfigError(f"{url!r} is not a URL that can be written to")
    if not basename(url) and "://" in url:
        raise ConfigError(f"{url}: name a folder below the bucket, not the bucket itself")
    return url
