"""Refuses a run folder that holds another run, before anything is done: a run is replaced only on
request. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.artifacts.urls import join
from trainyard.checkpoint.steps import (
    CONFIG,
    manifest_of,
    published_steps,
    step_document,
    step_folder,
)
from trainyard.config import flag
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.options.course import identity_of
from trainyard.training.options.pretrain import PretrainConfig

ASIDE = "superseded"
"""Folder in a run folder for steps of other runs and damaged steps."""


def refuse_other_runs(
    config: PretrainConfig, lineage: str, input_digests: Mapping[str, str]
) -> None:
    """ConfigError if --save has steps of another model, data, seed or kind of optimizer.

    Names every difference and both ways on. --new-run allows it."""
    if config.new_run or config.save is None:
        return
    for step in reversed(published_steps(config.save)):
        url = join(config.save, step_folder(step))
        try:
            manifest = manifest_of(url)
            if manifest is None or manifest.lineage == lineage:
                continue
            document = step_document(url, CONFIG)
        except ArtifactError:
            continue  # a damaged step is skipped and logged when the run resumes
        differences = _differences(config, document, input_digests)
        listed = "; ".join(differences) or "written by another version, or by a program"
        raise ConfigError(
            f"--save {config.save} holds another run, which is at step {step}: {listed}. To resume "
            f"from its checkpoint, give --load {config.save} and another --save; to train from "
            f"step 0 here, give --new-run, which moves its steps to {ASIDE}/. Nothing was changed"
        )


def _differences(
    config: PretrainConfig, document: Mapping[str, Any], input_digests: Mapping[str, str]
) -> list[str]:
    """What makes the run another one, each with its value there and here."""
    there, here = document.get("run", {}), identity_of(config)
    found = [
        f"{flag(name)} is {value!r} here and {there[name]!r} there"
        for name, value in here.items()
        if name in there and there[name] != value
    ]
    digests = document.get("inputs", {})
    for name in sorted(digests.keys() | input_digests.keys()):
        before, now = digests.get(name), input_digests.get(name)
        if before is None or now is None:
            found.append(f"input {name} is {'new' if before is None else 'gone'}")
        elif before != now:
            found.append(f"input {name} has other contents ({before[:8]} -> {now[:8]})")
    return found
