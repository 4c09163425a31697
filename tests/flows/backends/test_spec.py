"""What may be launched: pure data, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from flows.backends.spec import LaunchSpec, Mount, Resources, Shares
from trainyard.errors import ConfigError


def spec(**values: Any) -> LaunchSpec:
    return LaunchSpec(**{"name": "job", "command": ("true",), "run_directory": "runs", **values})


def test_a_process_needs_a_name_a_command_and_a_folder() -> None:
    assert spec().resources == Resources()
    assert spec().image is None


@pytest.mark.parametrize("name", ["", "Job", "two words", "-job", "a/b"])
def test_a_name_that_no_queue_would_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="job name"):
        spec(name=name)


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="command is empty"):
        spec(command=())


@pytest.mark.parametrize(
    "key",
    [
        *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "password"),
        *("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"),
    ],
)
def test_a_secret_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret"):
        spec(environment={key: "x"})


def test_names_that_only_resemble_a_secret_are_accepted() -> None:
    spec(environment={"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "KEYRING": "no"})


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"processes_per_node": 0}, "processes_per_node must be at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node must not be negative"),
        ({"time_limit_seconds": 0}, "time_limit_seconds must be positive"),
    ],
)
def test_impossible_resources_are_refused(values: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Resources(**values)


# --- for schedulers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"environment": {"A B": "x"}}, "'A B' is not a valid name of an environment variable"),
        ({"environment": {"A": "x\0y"}}, "may hold a NUL"),
        ({"command": ("echo", "\0")}, "may hold a NUL"),
        ({"image": "yard:1 --privileged"}, "is not a reference to an image"),
        ({"key": "Key"}, "key 'Key'"),
        ({"key": "k" * 41}, "at most 40"),
        (
            {"shares": Shares(count=2), "resources": Resources(nodes=2)},
            r"shares exclude nodes \(2\) and processes_per_node \(1\)",
        ),
        (
            {"rank_launcher": (), "resources": Resources(processes_per_node=8)},
            "need a rank_launcher",
        ),
    ],
)
def test_jobs_that_no_scheduler_could_start_are_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        spec(**values)


@pytest.mark.parametrize("image", ["yard:1", "/images/yard.sqsh", "nvcr.io#nvidia/pytorch:25.09"])
def test_references_and_paths_of_images(image: str) -> None:
    assert spec(image=image).image == image


@pytest.mark.parametrize(("source", "target"), [("data", "/data"), ("/a:b", "/b"), ("/a", "/b,c")])
def test_mounts_that_a_list_could_not_hold_are_refused(source: str, target: str) -> None:
    with pytest.raises(ConfigError, match="write an absolute path"):
        Mount(source=source, target=target)


def test_shares_are_in_order_and_once_each() -> None:
    assert Shares(count=3).indices == (0, 1, 2)
    assert Shares(count=9, only=(7, 2, 7)).indices == (2, 7)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"count": 0}, "count must be at least 1"),
        ({"count": 2, "at_once": 0}, "at_once must be at least 1"),
        ({"count": 2, "only": (1, 2, 5)}, r"\[2, 5\] are not among 2 shares"),
    ],
)
def test_impossible_shares_are_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Shares(**values)


def test_several_processes_are_ranks_and_shares_are_not() -> None:
    assert spec(resources=Resources(processes_per_node=2)).has_ranks
    assert not spec(shares=Shares(count=8)).has_ranks
