"""Packages of Retro: missed only where someone wants to run its stages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from flows.doctor.check import State
from flows.doctor.context import YardContext
from flows.doctor.stage_packages import retro
from flows.yard.read_profile import parse_profile


def yard(folder: Path, **tables: Any) -> YardContext:
    return YardContext(parse_profile({"block": "process", **tables}, "test"), str(folder))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modules that this Python lacks from now on."""
    hidden: set[str] = set()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find(name)
    )
    return hidden


def test_the_installed_versions_are_named(tmp_path: Path) -> None:
    found = retro(yard(tmp_path))
    assert found.state is State.OK
    assert found.message.startswith("h5py ")
    assert "faiss" in found.message


@pytest.mark.parametrize(
    ("tables", "wanted"),
    [
        ({"resources": {"faiss_add": {"processes_per_node": 1}}}, "[resources.faiss_add]"),
        ({"limits": {"retro_embed": 2}}, "[limits.retro_embed]"),
        ({"deployments": ["build-retro"]}, "deployment build-retro"),
        ({"schedules": {"pretrain-retro": {"cron": "0 3 * * *"}}}, "[schedules.pretrain-retro]"),
    ],
)
def test_a_profile_that_names_retro_needs_its_packages(
    without: set[str], tmp_path: Path, tables: dict[str, Any], wanted: str
) -> None:
    without |= {"faiss"}
    found = retro(yard(tmp_path, **tables))
    assert found.state is State.FAIL
    assert f"no faiss, which {wanted} of the profile need" in found.message
    assert "'.[faiss]'" in found.todo


def test_nobody_else_needs_them(without: set[str], tmp_path: Path) -> None:
    without |= {"faiss", "h5py"}
    assert retro(yard(tmp_path)).state is State.SKIPPED
    slurm = yard(tmp_path, block="slurm", deployments=["build-retro"])
    assert retro(slurm).state is State.SKIPPED
