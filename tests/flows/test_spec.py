"""What may be launched: pure data, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from flows.launch.spec import LaunchSpec, Resources
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
    "key", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "PREFECT_API_KEY", "password"]
)
def test_a_secret_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret"):
        spec(environment={key: "x"})


def test_what_only_sounds_like_a_secret_is_not() -> None:
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
