"""Describe one checkpoint, or compare two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from stages.inspect.config import InspectConfig
from stages.inspect.tables import description_table
from stages.runtime.context import StageRun
from trainyard.checkpoint.describe import describe
from trainyard.checkpoint.step_shards import Verify
from trainyard.checkpoint.stored_step import StoredStep, open_step
from trainyard.errors import ConfigError, DataError


class CheckpointsDiffer(DataError):  # noqa: N818  # says what was found
    """--diff found a difference. Exit status 4: not that of a fault in what was read."""

    exit_status = 4


def run(config: InspectConfig, stage: StageRun) -> dict[str, Any]:
    """Print the answer. Raises CheckpointsDiffer after printing what differs."""
    if config.diff is None:
        with open_step(config.checkpoint, "--checkpoint", config.verify_checkpoint) as step:
            step.check()
            _check_filter(config, step)
            _show_description(config, step)
        return {}
    _check_both(config, config.diff)
    from stages.inspect.compare import differences  # torch, as the table of them needs it
    from stages.inspect.differences import differences_table

    found = differences(config, config.diff, matches(config.filter), stage)
    if config.json:
        print(_as_json(found.document()))
    else:
        print(differences_table(found, config.max_rows))
    if found.count:
        raise CheckpointsDiffer(f"{config.checkpoint} and {config.diff} differ: {found.summary}")
    return {}


def matches(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is asked for by --filter."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns or ("*",))


def _check_both(config: InspectConfig, diff: str) -> None:
    """Before torch is loaded to compare them; digests are compared then."""
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
                f"--filter {pattern}: none of the {len(names)} tensors matches; names are as "
                f"{first}"
            )


def _show_description(config: InspectConfig, step: StoredStep[Any]) -> None:
    description = describe(step, matches(config.filter))
    if config.json:
        print(_as_json(description.document()))
    else:
        print(description_table(description, config.max_rows))


def _as_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)
