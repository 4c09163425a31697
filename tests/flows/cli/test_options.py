"""Which yard, and where its things lie: one spelling everywhere, the older ones, and mistakes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flows.cli.flow_commands import main as run
from flows.cli.options import add_yard, add_yard_of_flow, check_profile, check_root
from flows.doctor.command import main as doctor
from flows.gc.command import main as gc
from flows.register.command import main as register
from tests.flows.processes import ROOT
from trainyard.errors import ConfigError

Main = Callable[[Sequence[str]], int]
RECIPE = str(ROOT / "recipes/quickstart.toml")


@pytest.mark.parametrize("root", ["--root", "--yard"])
def test_a_flow_takes_the_root_by_both_names(root: str) -> None:
    parser = argparse.ArgumentParser()
    add_yard_of_flow(parser)
    given = parser.parse_args(["--profile", "slurm", root, "s3://bucket/yard"])
    assert (given.profile, given.yard) == ("slurm", "s3://bucket/yard")


@pytest.mark.parametrize("profile", ["--profile", "--yard"])
def test_what_looks_after_a_yard_takes_the_profile_by_both_names(profile: str) -> None:
    parser = argparse.ArgumentParser()
    add_yard(parser)
    given = parser.parse_args([profile, "slurm", "--root", "s3://bucket/yard"])
    assert (given.yard, given.root) == ("slurm", "s3://bucket/yard")


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (run, ["pretrain-gpt", RECIPE, "--yard", "slurm"]),
        (run, ["pretrain-gpt", RECIPE, "--root", "/etc/yards/slurm.toml"]),
        (run, ["run-stage", "merge", "--config", "none.toml", "--yard", "slurm"]),
        (gc, ["--root", "slurm"]),
        (doctor, ["--root", "slurm"]),
    ],
)
def test_a_profile_in_the_place_of_the_root_is_refused(
    main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    stderr = capsys.readouterr().err
    assert "slurm" in stderr.partition("write --profile ")[2]


@pytest.mark.parametrize("main", [gc, doctor, register])
@pytest.mark.parametrize("root", ["s3://bucket/yard", "{folder}"])
def test_a_root_in_the_place_of_a_profile_is_refused(
    main: Main, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = root.format(folder=tmp_path)
    assert main(["--yard", root]) == 2
    stderr = capsys.readouterr().err
    if main is register:
        assert "register takes no root" in stderr
    else:
        assert f"write --root {root}" in stderr


@pytest.mark.parametrize("root", [None, "yard", "./slurm", "runs/slurm", "s3://slurm", "mine.v2"])
def test_what_can_be_a_root_is_none_of_our_business(root: str | None) -> None:
    check_root(root)


@pytest.mark.parametrize("profile", ["local", "slurn", "mysite.toml", "s3://yards/mysite.toml"])
def test_a_possible_profile_name_is_accepted(profile: str) -> None:
    check_profile(profile)


def test_a_folder_with_the_name_of_a_profile_is_reached_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"A folder of that name is --root \./local"):
        check_root("local")
