"""Parameters of deployments as clients send them: by REST, and by Prefect's command line."""

from __future__ import annotations

import json
import urllib.error
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from flows.register.desired_state import ROOT, read_deployments
from tests.yard.operator.deployed import Api, register
from tests.yard.yard import Yard

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

OF_TYPE = {"integer": 3, "number": 0.5, "string": "x", "boolean": True}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Yard:
    """A yard whose deployments are registered, without a worker."""
    folder = tmp_path_factory.mktemp("parameters")
    yard = Yard(folder, {**prefect_api, "PREFECT_HOME": str(folder / "home")})
    profile = folder / "asked.toml"
    profile.write_text("")
    register(yard, str(profile))
    return yard


@pytest.fixture(scope="module")
def server(yard: Yard) -> Api:
    return Api(yard.environment["PREFECT_API_URL"])


FLOWS = [entry["entrypoint"].partition(":")[2] for entry in read_deployments(ROOT / "prefect.yaml")]


def value_for(field: dict[str, Any]) -> Any:
    """A value that a form may send."""
    if "anyOf" in field:
        return value_for(field["anyOf"][0])
    return field["enum"][-1] if "enum" in field else OF_TYPE[field["type"]]


@pytest.mark.parametrize("flow", [name.replace("_", "-") for name in FLOWS])
def test_a_run_has_what_was_sent_and_nothing_else(server: Api, flow: str) -> None:
    deployment = server.ask(f"deployments/name/{flow}/asked")
    own = deployment["parameters"]
    assert own["profile"] == "asked"
    assert flow in deployment["tags"]
    schema = deployment["parameter_openapi_schema"]
    needed = {name: value_for(schema["properties"][name]) for name in schema.get("required", [])}
    run = server.begin(f"{flow}/asked", **needed)
    assert server.ask(f"flow_runs/{run}")["parameters"] == {**own, **needed}
    for name, field in schema["properties"].items():
        given = {**needed, name: value_for(field)}
        run = server.begin(f"{flow}/asked", **given)
        assert server.ask(f"flow_runs/{run}")["parameters"] == {**own, **given}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trainiters": 5}, "'trainiters' is not one of ['recipe', 'train_iters', "),
        (
            {"train_iters": "many"},
            "'train_iters'. Failure reason: 'many' is not of type 'integer', 'null'",
        ),
        ({"bf16": "yes"}, "'yes' is not one of ['as the recipe says', True, False]"),
        ({"overrides": "pretrain.lrr = 1"}, "is not one of ['options of pretrain but data_path, "),
    ],
)
def test_the_server_refuses_a_wrong_parameter(
    server: Api, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.begin("pretrain-gpt/asked", **given)
    assert refused.value.code == HTTPStatus.CONFLICT
    assert words in json.loads(refused.value.read())["detail"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("trainiters=5", "not found on the deployment: 'trainiters'"),
        ("train_iters=many", "'many' is not of type 'integer', 'null'"),
        ("overrides=pretrian.lr = 1", "is not one of ['lines of STAGE.KEY = VALUE; stages: "),
    ],
)
def test_the_command_line_prints_the_error(yard: Yard, given: str, words: str) -> None:
    command = ("-m", "prefect", "deployment", "run", "pretrain-gpt/asked", "--param", given)
    refused = yard.run(*command)
    assert refused.status == 1
    told = " ".join((refused.out + refused.err).split())
    assert words in told
    assert "Traceback" not in told
    assert Path(yard.folder, "yard").exists() is False
