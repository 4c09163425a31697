"""The forms of flows: every option of a stage with its words, default and choices."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flows.pretrain_gpt import pretrain_gpt
from flows.recipes.form_schema import DECIDED, non_empty, options_schema
from flows.register.desired_state import ROOT, read_deployments
from flows.stage_configs import CONFIGS
from trainyard.config import leaves

ENTRYPOINTS = [entry["entrypoint"] for entry in read_deployments(ROOT / "prefect.yaml")]


@pytest.mark.parametrize("stage", CONFIGS)
def test_a_form_has_every_option_that_no_flow_decides_with_words(stage: str) -> None:
    schema = options_schema(stage)
    names = {name for name, _, _ in leaves(CONFIGS[stage])} - {*DECIDED.get(stage, ())}
    assert set(schema["properties"]) == names
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, option in schema["properties"].items():
        words = option["description"]
        assert words.partition("Default:")[0].strip(), name


def test_an_option_tells_type_default_and_choices() -> None:
    options = options_schema("pretrain")["properties"]
    assert options["num_layers"]["type"] == "integer"
    assert "Required" in options["num_layers"]["description"]
    assert options["clip_grad"]["type"] == "number"
    assert options["clip_grad"]["description"].endswith("Default: 1.0.")
    assert "cosine" in options["lr_decay_style"]["enum"]
    assert options["swiglu"] == {
        "title": "swiglu",
        "description": options["swiglu"]["description"],
        "type": "boolean",
    }
    prompts = options_schema("benchmark")["properties"]["prompts"]
    assert (prompts["type"], prompts["items"]) == ("array", {"type": "string"})


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_every_parameter_of_a_flow_is_explained(entrypoint: str) -> None:
    flow: Any = load_flow_from_entrypoint(str(ROOT / entrypoint))
    assert flow.name == entrypoint.rpartition(":")[2].replace("_", "-")
    schema = parameter_schema(flow).model_dump_for_openapi()
    for name, parameter in schema["properties"].items():
        assert parameter.get("description"), name
    assert "profile" in schema["properties"]


def test_the_form_of_a_flow_refuses_what_the_stage_would() -> None:
    schema = parameter_schema(pretrain_gpt).model_dump_for_openapi()
    check = jsonschema.Draft202012Validator(schema).is_valid
    assert check({"pretrain": {"train_iters": 8, "lr": 1e-3, "lr_decay_style": "cosine"}})
    for name, parameter in schema["properties"].items():  # what the pages send untouched
        assert "default" not in parameter or check({name: parameter["default"]})
    assert not check({"pretrain": {"train_iter": 8}})
    assert not check({"pretrain": {"train_iters": "many"}})
    assert not check({"pretrain": {"lr_decay_style": "cosinus"}})
    assert not check({"pretrain": {"save": "/elsewhere"}})


def test_what_is_left_empty_in_a_form_stays_as_the_recipe_says() -> None:
    filled = {"pretrain": {"lr": 1e-3, "min_lr": None}, "merge": {}, "plan": {"json": None}}
    assert non_empty(filled) == {"pretrain": {"lr": 1e-3}}
