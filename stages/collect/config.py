"""Options of `python -m stages.collect`, and the fingerprint of the environment it reads."""

from __future__ import annotations

import hashlib
import os
import site
import sys
from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import location
from trainyard.errors import ConfigError

OURSELVES = "trainyard"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig:
    """Make a corpus from the documentation that comes with Python: real text, no network."""

    output_dir: str = location()
    """Folder or URL to write train-00000.jsonl and so on, and heldout.txt."""
    max_size_mb: float = 12.0
    """Stop at about this many megabytes (10^6 bytes) of text."""
    num_shards: int = 4
    """Number of training files."""
    conversations: bool = False
    """Write questions about functions and classes with their answers, for stages.finetune, instead
    of documents; those held out are in heldout.jsonl."""
    environment: str = ""
    """Fingerprint of this Python and its packages; unset: computed."""

    def __post_init__(self) -> None:
        if self.max_size_mb <= 0:
            raise ConfigError(f"--max-size-mb must be positive, got {self.max_size_mb}")
        if not 1 <= self.num_shards <= 99999:
            raise ConfigError(f"--num-shards must be from 1 to 99999, got {self.num_shards}")
        if not self.environment:
            object.__setattr__(self, "environment", environment_fingerprint())

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: `environment` names what the stage reads."""
        return {}

    def output(self) -> Output | None:
        """A folder."""
        return Output.directory(self.output_dir)


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
