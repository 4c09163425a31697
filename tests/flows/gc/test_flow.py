"""The sweep as a flow takes what the command line takes."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import asdict, fields

import pytest

from flows import collect_garbage as module
from flows.collect_garbage import collect_garbage
from flows.gc.policy import STANDARD, Policy
from flows.yard.profile import Profile
from flows.yard.read_profile import parse_profile

OTHERS = {"profile", "yard", "remove"}


def test_its_parameters_are_the_policy_with_the_same_defaults() -> None:
    found = inspect.signature(collect_garbage.fn).parameters
    defaults = {name: one.default for name, one in found.items() if name not in OTHERS}
    assert defaults == asdict(STANDARD)
    for field in fields(Policy):
        assert found[field.name].annotation in (field.type, type(field.default))


def test_each_is_explained_in_the_form() -> None:
    doc = inspect.getdoc(collect_garbage.fn) or ""
    assert [field.name for field in fields(Policy) if f"{field.name}: " not in doc] == []


class SeenError(Exception):
    """What a sweep was asked to do."""


def test_what_is_given_is_what_it_sweeps_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def profile(name: str) -> Profile:
        return parse_profile({}, name)

    def sweep(root: str, homes: object, policy: Policy, remove: bool, *more: object) -> None:
        raise SeenError(policy, remove)

    monkeypatch.setattr(module, "yard_profile", profile)
    monkeypatch.setattr(module, "sweep", sweep)
    given = {field.name: 40 + place for place, field in enumerate(fields(Policy))}
    with pytest.raises(SeenError) as seen:
        asyncio.run(collect_garbage.fn(remove=True, **given))
    assert seen.value.args == (Policy(**given), True)
