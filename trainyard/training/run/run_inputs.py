"""The token files that a run was made of, found again: by the manifest of a finished run, or by
whoever says where they lie now, and held to the digests that its checkpoints tell. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import Manifest
from trainyard.datasets.config import DataConfig
from trainyard.errors import ConfigError, DataError

LOAD = "load"
"""Name of the input of `pretrain` that is a checkpoint to go on from."""

INPUT = re.compile(r"(data|train|valid|test)_(\d+)(?: \(weight (.+)\))?")
"""Name of an input of `pretrain` that is a prefix of token files; `DataConfig.inputs` gives it."""


def named_token_files(manifest: Manifest) -> dict[str, list[str]]:
    """Where the token files of a finished run lay, as values of `data_path`, `train_data_path` and
    so on; {} for a run without any."""
    named = [
        (match, record)
        for name, record in manifest.inputs.items()
        if (match := INPUT.fullmatch(name))
    ]
    paths: dict[str, list[str]] = {}
    for match, record in sorted(named, key=lambda found: int(found[0][2])):
        kind = "data_path" if match[1] == "data" else f"{match[1]}_data_path"
        paths.setdefault(kind, []).extend([*([match[3]] if match[3] else []), *record.urls])
    return paths


def check_token_files(data: DataConfig, made_of: Mapping[str, str], option: str, skip: str) -> None:
    """Refuse token files that are not those of the run that `option` names.

    made_of: digest of each input of the run. skip: the flag that goes on all the same."""
    for name, urls in data.inputs().items():
        if name not in made_of:
            raise ConfigError(
                f"--data-path: the run of {option} has no input {name}; give its prefixes and "
                f"weights, in its order: {', '.join(n for n in made_of if INPUT.fullmatch(n))}"
            )
        if resolve(name, urls).digest != made_of[name]:
            raise DataError(
                f"{', '.join(urls)}: not the token files that the run of {option} was made of "
                f"(input {name} has another digest); {skip} goes on all the same"
            )
