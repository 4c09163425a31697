"""What a stage writes to: a folder, or a prefix such as Megatron's token files have. Pure names."""

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
FINAL_NAMES = "final-"
"""How the notes in a work folder begin that list the final names a run began to write."""


def is_housekeeping(name: str) -> bool:
    """True for what stands beside the files of artifacts: manifests, claims, unfinished work."""
    folders, _, file = name.rpartition("/")
    beside = any(file == own or file.endswith("." + own) for own in (MANIFEST, CLAIM))
    return beside or any(folder.endswith(WORK) for folder in folders.split("/"))


@dataclass(frozen=True, slots=True)
class Output:
    """The place of an artifact, and of what stands beside it while it is being made.

    directory D:  D/NAME, D/manifest.json, D/.work/, D/.claim.json
    prefix P:     PNAME, P.manifest.json, P.work/, P.claim.json"""

    url: str
    is_prefix: bool
    names: tuple[str, ...] = ()
    """What may follow the prefix in what a run writes or removes, folders included; none: it cannot
    be told, so anything that follows a '.' or a '_'."""

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
        """The folder in which everything of this output lies."""
        return parent(self.url) if self.is_prefix else self.url

    @property
    def manifest_url(self) -> str:
        """Written last; what has none does not exist."""
        return f"{self.url}.{MANIFEST}" if self.is_prefix else join(self.url, MANIFEST)

    @property
    def claim_url(self) -> str:
        """Held by the one run that is writing."""
        return f"{self.url}.{CLAIM}" if self.is_prefix else join(self.url, f".{CLAIM}")

    @property
    def work_url(self) -> str:
        """What outlives a killed run and dies with a finished one."""
        return f"{self.url}.work" if self.is_prefix else join(self.url, WORK)

    def first_written(self, urls: Sequence[str]) -> str | None:
        """The first of some places where a run may write, replace or remove something."""
        places = self.places() if self.is_prefix else [self.url]
        exact = frozenset(canonical_each(places))
        begins = tuple(place.rstrip("/") + "/" for place in exact)
        if self.is_prefix and not self.names:
            begins = (canonical(self.url) + ".", canonical(self.url) + "_")
        for url, place in zip(urls, canonical_each(urls), strict=True):
            if place in exact or place.startswith(begins):
                return url
        return None

    def is_matched_by(self, pattern: str) -> bool:
        """Whether a pattern means a file that a run may write."""
        whole = PurePosixPath(canonical(pattern))
        places = self.places() if self.names else ()
        return any(PurePosixPath(canonical(place)).match(str(whole)) for place in places)

    def places(self) -> list[str]:
        """Of a prefix: every file and folder that a run may write or remove."""
        beside = [self.manifest_url, self.claim_url, self.work_url]
        return [*beside, *(self.file_url(name) for name in self.names)]

    def file_url(self, name: str) -> str:
        """Where the file of that name lies."""
        return (
            self.url + check_relative(name)
            if self.is_prefix
            else join(self.url, check_relative(name))
        )


def _checked(url: str) -> str:
    if not url.strip() or "\0" in url:
        raise ConfigError(f"{url!r} is not a place that can be written to")
    if not basename(url) and "://" in url:
        raise ConfigError(f"{url}: name a folder below the bucket, not the bucket itself")
    return url
