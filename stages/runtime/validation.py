"""--retro-task-validate: a sample of the blocks of an output is computed again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stages.runtime.context import StageRun
from trainyard.artifacts.manifest import Manifest, read_manifest
from trainyard.artifacts.output import Output
from trainyard.config import digest_relevant, flag
from trainyard.errors import ArtifactError, ConfigError

SEED = 1234


def sample_blocks(count: int, share: float) -> list[int]:
    """Increasing numbers of the blocks to compute again: a seeded sample, at least one."""
    size = math.ceil(count * share)
    chosen = np.random.default_rng(SEED).choice(count, size, replace=False)
    return sorted(chosen.tolist())


def check_same_run(config: Any, stage: StageRun, output: Output) -> Manifest:
    """The manifest of the output; ConfigError if it is of other options or inputs."""
    found = read_manifest(output.manifest_url)
    if found is None:
        raise ArtifactError(
            f"--output-dir {output.url}: no manifest.json, so there is no finished output to "
            "validate; run without --retro-task-validate first"
        )
    manifest, mine = found[0], digest_relevant(config)
    for key in sorted(mine.keys() | manifest.config.keys()):
        before = manifest.config.get(key)
        if before != mine.get(key):
            raise ConfigError(
                f"{flag(key)} {mine.get(key)!r}: {output.url} was made with {before!r}; give the "
                "options that it was made with"
            )
    for name, given in stage.inputs.items():
        record = manifest.inputs.get(name)
        if record is None or record.digest != given.digest:
            raise ConfigError(
                f"input {name} ({', '.join(given.urls)}) is not the one that {output.url} was made "
                "from; give that, or make the output again"
            )
    return manifest
