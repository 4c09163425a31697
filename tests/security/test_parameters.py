"""Parameters of a flow run that somebody starts through a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows.register.deployments import form_of
from flows.run_stage import run_stage
from flows.runner.flow_errors import refuse_credentials, report_errors
from flows.yard import registered_profile
from flows.yard.registered_profile import yard_profile
from trainyard.errors import ConfigError

SECRET = "hunter2"

PROGRAM = """
block = "process"
python = "{folder}/evil"
"""

PROFILES = [
    "https://evil.example/site.toml",
    f"https://user:{SECRET}@evil.example/site.toml",
    "s3://bucket/site.toml",
    "file:///tmp/site.toml",
    "{folder}/site.toml",
    "{folder}/local.toml",
    "site.toml",
    "./site.toml",
    "../site.toml",
    "site.toml/../../site.toml",
    "../../tmp/site",
    "/etc/passwd",
    "deploy/yards/local.toml",
    "local\n",
    "local\x1b[2J",
    "local/../../x",
    "",
    "local#.toml",
]


WITH_PASSWORD: list[Any] = [
    f"https://user:{SECRET}@evil.example/recipe.toml",
    f"s3://{SECRET}@bucket/key",
    f"s3://key:{SECRET}/x@host/bucket",
    f'corpus = ["https://user:{SECRET}@host/a.jsonl"]',
    f"collect.input = 'a'\npretrain.load = 's3://user:{SECRET}@host/run' # run",
    f"a,https://host/x,https://user:{SECRET}@host/y",
    {"input": ["a", f"hdfs://user:{SECRET}@host/a"]},
    {f"https://user:{SECRET}@host": 1},
    {"a": {"b": [{"c": [[f"hdfs://user:{SECRET}@host/a"]]}]}},
    {"a": [["a"], {"b": f"ftp://{SECRET}@host"}]},
    f"HTTPS://User:{SECRET}@host",
]

WITHOUT = [
    "recipes/quickstart.toml",
    "s3://bucket/user@example.org/a.toml",
    "https://host:8443/a@b.toml",
    "pretrain.lr = 1 # see https://host/page?a=b#c",
    "pretrain.title = 'a@b'",
    {"input": ["a"], "n": 1, "x": None},
]


@pytest.mark.parametrize("value", WITH_PASSWORD, ids=str)
def test_a_flow_refuses_a_password_in_any_parameter(value: Any) -> None:
    @report_errors
    async def a_flow(recipe: Any, force: bool = False) -> None:
        raise AssertionError("it ran")

    state: Any = asyncio.run(a_flow(value))
    assert state.is_failed()
    assert "parameter recipe has a URL with a user or a password" in state.message
    assert SECRET not in state.message


@pytest.mark.parametrize("value", WITHOUT, ids=str)
def test_a_parameter_without_a_password_is_taken(value: Any) -> None:
    refuse_credentials({"x": value})
    validate({"stage": "plan", "options": value}, form_of(run_stage), raise_on_error=True)


@pytest.mark.parametrize("value", WITH_PASSWORD, ids=str)
def test_a_server_takes_no_run_with_a_password(value: Any) -> None:
    """By the check that Prefect's server does before it keeps anything of a run."""
    with pytest.raises(ValidationError, match="without a user or password in a URL"):
        validate({"stage": "plan", "options": value}, form_of(run_stage), raise_on_error=True)


class NoBlocks:
    """A server where no profile is registered."""

    async def __aenter__(self) -> NoBlocks:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read_block_document_by_name(self, *_: Any) -> Any:
        raise ObjectNotFound(Exception("none"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile of the attacker."""
    for name in ("site", "local"):
        (tmp_path / f"{name}.toml").write_text(PROGRAM.format(folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registered_profile, "get_client", NoBlocks)
    return tmp_path


def started_by_a_server(monkeypatch: pytest.MonkeyPatch, is_started: bool = True) -> None:
    deployment = SimpleNamespace(id="an id" if is_started else None)
    monkeypatch.setattr(registered_profile, "runtime", SimpleNamespace(deployment=deployment))


@pytest.mark.parametrize("pattern", PROFILES)
def test_a_deployment_takes_no_profile_by_its_address(
    pattern: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by_a_server(monkeypatch)
    with pytest.raises(ConfigError, match="takes the name of a registered profile") as caught:
        asyncio.run(yard_profile(pattern.format(folder=site)))
    assert SECRET not in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_deployment_takes_a_profile_that_comes_with_trainyard(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by_a_server(monkeypatch)
    assert asyncio.run(yard_profile("local")).name == "local"
    assert asyncio.run(yard_profile("local")).python is None
    with pytest.raises(ConfigError, match="there is no yard profile 'site'"):
        asyncio.run(yard_profile("site"))


def test_a_user_at_a_shell_may_name_a_file(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_by_a_server(monkeypatch, is_started=False)
    assert asyncio.run(yard_profile(str(site / "site.toml"))).python == f"{site}/evil"
