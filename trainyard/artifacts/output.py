"""What a stage writes to: a folder, or a prefix such as Megatron's token files have. Pure names."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.urls import basename, check_relative, join, parent
from trainyard.errors import ConfigError

MANIFEST = "manifest.json"
WORK = ".work"
CLAIM = "claim.json"


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

    @staticmethod
    def directory(url: str) -> Output:
        """An artifact that is a folder."""
        return Output(_checked(url).rstrip("/") or "/", is_prefix=False)

    @staticmethod
    def prefix(url: str) -> Output:
        """An artifact whose files share a prefix: `tokens/corpus` with `_text_document.bin`."""
        if _checked(url).endswith("/"):
            raise ConfigError(f"{url}: an output prefix ends in a name, not in '/'")
        return Output(url, is_prefix=True)

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
