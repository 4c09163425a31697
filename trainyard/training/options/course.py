"""The options of a run by kind: those that identify it, and those that may change in the middle of
it. All others never matter. Standard library only."""

from __future__ import annotations

from typing import Any

from trainyard.config import COURSE, ROLE, differing, digest_relevant, leaves
from trainyard.training.options.pretrain import PretrainConfig


def identity_of(config: PretrainConfig) -> dict[str, Any]:
    """The options that make a run the one it is: model, data, seed, kind of optimizer."""
    course = course_of(config)
    return {name: v for name, v in digest_relevant(config).items() if name not in course}


def lineage_options(config: PretrainConfig) -> dict[str, Any]:
    """The options that identify a run, without those at their defaults: a version with one option
    more has the same lineage."""
    given = differing(config)
    return {name: value for name, value in identity_of(config).items() if name in given}


def course_of(config: PretrainConfig) -> dict[str, Any]:
    """The options that may change in the middle of a run, as its documents have them."""
    roles = {name: field.metadata.get(ROLE) for name, _, field in leaves(type(config))}
    names = {name for name, role in roles.items() if role == COURSE} | set(config.describes())
    return {name: value for name, value in digest_relevant(config).items() if name in names}
