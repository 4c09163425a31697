"""Describes a checkpoint, or compares two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from stages.inspect.config import InspectConfig
from stages.inspect.tables import description_table
from stages.runtime.context import StageRun
from trainyard.checkpoint.describe import describe
from trainyard.checkpoint.stored_step import StoredStep, Verify, open_step
from trainyard.errors import ConfigError, DataError


class CheckpointsDiffer(DataError):  # noqa: N818  # a result, not a fault
    """--diff found a difference. Its exit status is 4, apart from that of damaged files."""

    exit_status = 4


def run(config: InspectConfig, stage: StageRun) -> dict[str, Any]:
    """Print the description or the differences; differences then raise CheckpointsDiffer."""
    if config.diff is None:
        with open_step(config.checkpoint, "--checkpoint", config.verify_checkpoint) as step:
            step.check()
            _check_filter(config, step)
            description = describe(step, matches(config.filter))
            table = description_table(description, config.max_rows)
            print(_as_json(description.document()) if config.json else table)
        return {}
    _check_both(config, config.diff)
    from stages.inspect.differences import differences  # imports torch, so only after the checks

    found = differences(config, config.diff, matches(config.filter), stage)
    print(_as_json(found.document()) if config.json else found.table(config.max_rows))
    if found.count:
        raise CheckpointsDiffer(f"{config.checkpoint} and {config.diff} differ: {found.summary}")
    return {}


def matches(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A test whether a tensor's name matches --filter."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns or ("*",))


def _check_both(config: InspectConfig, diff: str) -> None:
    """Check both checkpoints before torch is imported. Digests are compared later."""
    verify: Verify = "none" if config.verify_checkpoint == "none" else "sizes"
    with (
        open_step(config.checkpoint, "--checkpoint", verify) as ours,
        open_step(diff, "--diff", verify) as theirs,
    ):
        ours.check()
        theirs.check()
        _check_filter(config, ours, theirs)


def _check_filter(config: InspectConfig, *steps: StoredStep[Any]) -> None:
    names = {name for step in steps for name in step.index}
    for pattern in config.filter:
        if not any(fnmatchcase(name, pattern) for name in names):
            first = ", ".join(sorted(names)[:3])
            raise ConfigError(
                f"--filter {pattern}: none of the {len(names)} tensors matches; their names are "
                f"like {first}"
            )


def _as_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)
