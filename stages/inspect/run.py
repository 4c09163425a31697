"""Describe one checkpoint, or compare two."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from stages.context import StageRun
from stages.inspect.config import InspectConfig
from stages.inspect.differences import Differences, differences_table
from stages.inspect.tables import description_table
from trainyard.checkpoint.compare import compare_documents, compare_tensors
from trainyard.checkpoint.describe import describe
from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.errors import ConfigError, DataError


class CheckpointsDiffer(DataError):  # noqa: N818  # says what was found
    """--diff found a difference. Exit status 4: not that of a fault in what was read."""

    exit_status = 4


def run(config: InspectConfig, stage: StageRun) -> dict[str, Any]:
    """Print the answer. Raises CheckpointsDiffer after printing what differs."""
    verify = config.verify_checkpoint
    with open_checkpoint(config.checkpoint, "--checkpoint", verify) as checkpoint:
        checkpoint.check()
        if config.diff is None:
            _check_filter(config, checkpoint)
            _show_description(config, checkpoint)
            return {}
        with open_checkpoint(config.diff, "--diff", verify) as other:
            other.check()
            _check_filter(config, checkpoint, other)
            found = _differences(config, stage, checkpoint, other)
    if config.json:
        print(_as_json(found.document()))
    else:
        print(differences_table(found, config.max_rows))
    if found.count:
        raise CheckpointsDiffer(f"{config.checkpoint} and {config.diff} differ: {found.summary}")
    return {}


def _matches(config: InspectConfig) -> Callable[[str], bool]:
    patterns = config.filter or ("*",)
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_filter(config: InspectConfig, *checkpoints: Checkpoint) -> None:
    names = {name for checkpoint in checkpoints for name in checkpoint.index}
    for pattern in config.filter:
        if not any(fnmatchcase(name, pattern) for name in names):
            first = ", ".join(sorted(names)[:3])
            raise ConfigError(
                f"--filter {pattern}: none of the {len(names)} tensors matches; names are as "
                f"{first}"
            )


def _show_description(config: InspectConfig, checkpoint: Checkpoint) -> None:
    description = describe(checkpoint, _matches(config))
    if config.json:
        print(_as_json(description.document()))
    else:
        print(description_table(description, config.max_rows))


def _differences(
    config: InspectConfig, stage: StageRun, ours: Checkpoint, theirs: Checkpoint
) -> Differences:
    matches = _matches(config)
    names = [name for name in ours.index if matches(name)]
    total = sum(ours.spec(name).size_bytes for name in names)
    with stage.progress(total, "bytes", "compare") as progress:
        tensors = tuple(compare_tensors(ours, theirs, matches, progress.update))
    keys = () if config.filter else tuple(compare_documents(ours, theirs))
    compared = len({name for side in (ours, theirs) for name in side.index if matches(name)})
    return Differences(ours.url, theirs.url, compared, tensors, keys)


def _as_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)
