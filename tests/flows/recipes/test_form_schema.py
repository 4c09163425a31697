"""The forms of flows: short, explained, and without a value in a field that nobody filled."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flows.pretrain_gpt import pretrain_gpt
from flows.recipes.form_schema import ADVICE, form_schema, recipes_in
from flows.recipes.overrides import DECIDED, STAGES_OF, names_of
from flows.recipes.recipe import stage_of
from flows.register.deployments import form_of
from flows.register.desired_state import ROOT, read_deployments
from flows.stage_configs import CONFIGS

ENTRYPOINTS = [entry["entrypoint"] for entry in read_deployments(ROOT / "prefect.yaml")]


@cache
def loaded(entrypoint: str) -> Any:
    flow: Any = load_flow_from_entrypoint(str(ROOT / entrypoint))
    assert flow.name == entrypoint.rpartition(":")[2].replace("_", "-")
    return flow


@cache
def form(entrypoint: str) -> dict[str, Any]:
    return form_of(loaded(entrypoint))


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_every_field_of_a_form_is_explained_and_there_are_few(entrypoint: str) -> None:
    fields = form(entrypoint)["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []
    assert "profile" in fields
    assert len(fields) <= 18


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_an_untouched_field_sends_nothing_or_the_flows_default(entrypoint: str) -> None:
    """The pages send every default, and false for each boolean without one."""
    schema, sent = form(entrypoint), parameter_schema(loaded(entrypoint)).properties
    defaults = {k: f["default"] for k, f in schema["properties"].items() if "default" in f}
    check = jsonschema.Draft202012Validator({**schema, "required": []}).is_valid
    assert check(defaults)
    assert None not in defaults.values()
    for name, field in schema["properties"].items():
        if field.get("type") == "boolean":
            assert defaults[name] is False
        if name in defaults:
            assert defaults[name] == sent[name]["default"]


def test_a_form_refuses_wrong_names_and_types() -> None:
    check = jsonschema.Draft202012Validator(form_of(pretrain_gpt)).is_valid
    assert check({"train_iters": 8, "lr": 1e-3, "bf16": True, "overrides": "pretrain.lr = 1"})
    assert check({"bf16": "as the recipe says", "recipe": "s3://bucket/mine.toml"})
    (refused,) = jsonschema.Draft202012Validator(form_of(pretrain_gpt)).iter_errors({"lrr": 8})
    assert refused.message.startswith("'lrr' is not one of ['recipe', 'train_iters', 'lr', ")
    assert not check({"train_iters": "many"})
    assert not check({"bf16": "yes"})
    assert not check({"pretrain": {"lr": 1e-3}})


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_a_form_takes_no_password_in_any_text_or_table(entrypoint: str) -> None:
    schema = {**form(entrypoint), "required": []}
    check = jsonschema.Draft202012Validator(schema)
    for name, field in schema["properties"].items():
        kinds = {one.get("type") for one in (field, *field.get("anyOf", []))}
        if "string" in kinds and "enum" not in field:
            given = {name: 'x = 1\ny = "s3://key:hunter2@host/a"'}
            assert any(ADVICE in error.message for error in check.iter_errors(given))
            assert check.is_valid({name: "s3://bucket/a@b"}), name
        if "object" in kinds:
            (error,) = check.iter_errors({name: {"x": [1, {"y": "s3://key:hunter2@host/a"}]}})
            assert ADVICE in error.message
            assert check.is_valid({name: {"x": ["s3://bucket/a@b", 1, None, {"y": True}]}}), name


GPT = ("flows/pretrain_gpt.py:pretrain_gpt", "pretrain", "lr = 1")
RETRO = ("flows/pretrain_retro.py:pretrain_retro", "bert", "lr = 1")
REFRESH = ("flows/corpus_refresh.py:corpus_refresh", "merge", "drop_provenance = true")


@pytest.mark.parametrize(("entrypoint", "stage", "known"), [GPT, RETRO, REFRESH])
def test_a_wrong_name_in_lines_of_overrides_is_refused_with_what_is_allowed(
    entrypoint: str, stage: str, known: str
) -> None:
    check = jsonschema.Draft202012Validator({**form(entrypoint), "required": []})

    def refusals(text: str) -> list[str]:
        return [
            error.message.partition(" is not one of ")[2]
            for error in check.iter_errors({"overrides": text})
        ]

    for text in ("", f"{stage}.{known}", f"# a = b\n\n  {stage}.{known} # c.d = 1\n"):
        assert refusals(text) == []
    for wrong in (f"{stage}.lrr = 1", f"{stage}.{known}\n {stage}.lr2=2", f"{stage}.a.b = 1"):
        (refused,) = refusals(wrong)
        assert refused.startswith(f"['options of {stage}")
        assert f"python -m stages.{stage_of(stage)} --help lists them']" in refused
    decided = DECIDED[stage_of(stage)][0]
    (refused,) = refusals(f"{stage}.{decided} = x")
    assert f"['options of {stage} but {decided}, " in refused
    for wrong in ("lr = 1", "pretrian.lr = 1", f"{stage}.{known}\nreport.x = 1", "inspect.x = 1"):
        (refused,) = refusals(wrong)
        assert refused.startswith("['lines of STAGE.KEY = VALUE; stages: ")
        assert f"{stage}" in refused


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_no_text_that_a_flow_accepts_is_refused(entrypoint: str) -> None:
    """Each name in a line of its own, and longer values and tables, which a line does not show."""
    flow = entrypoint.rpartition(":")[2].replace("_", "-")
    if flow not in STAGES_OF:
        return
    names = names_of(flow)
    full = [f"{stage}.{name}".lstrip(".") for stage, all in names.items() for name in all]
    check = jsonschema.Draft202012Validator({**form(entrypoint), "required": []})
    assert check.is_valid({"overrides": "\n".join(f"{name} = x" for name in full)})
    first = next(iter(STAGES_OF[flow]))
    for text in (
        f"[{first}]\nanything = 1",
        f"{first}.x = [\n  'a = b',\n]",
        f'{first}.x = """\nno.name = 1\n"""',
    ):
        assert check.is_valid({"overrides": text})  # the flow looks at it


def test_the_patterns_take_linear_time() -> None:
    schema = {**form("flows/pretrain_gpt.py:pretrain_gpt"), "required": []}
    check = jsonschema.Draft202012Validator(schema)
    for text in ("pretrain.lr = 1\n", "a" * 20, "\n", " \t", "a.", "pretrain.l", "# = "):
        took = []
        for size in (10_000, 20_000):
            began = time.process_time()
            check.is_valid({"overrides": text * (size // len(text))})
            took.append(time.process_time() - began)
        assert took[1] < 4 * took[0] + 0.05


def test_recipes_are_offered_and_presets_are_not() -> None:
    found = recipes_in(ROOT)
    assert {"recipes/quickstart.toml", "recipes/corpora/incoming.toml"} <= set(found)
    assert not any("models" in name for name in found)
    assert all((ROOT / name).is_file() for name in found)
    fields = form_of(pretrain_gpt)["properties"]
    offered, free = fields["recipe"]["anyOf"]
    assert (offered["enum"], free["type"]) == (found, "string")
    assert fields["recipe"]["default"] in found


def test_without_recipes_in_the_sources_the_field_is_free(tmp_path: Path) -> None:
    assert recipes_in(tmp_path) == []
    schema = form_schema(parameter_schema(pretrain_gpt).model_dump_for_openapi(), [])
    assert schema["properties"]["recipe"]["type"] == "string"


def test_a_stage_is_a_choice() -> None:
    fields = form("flows/run_stage.py:run_stage")["properties"]
    assert fields["stage"]["enum"] == sorted(CONFIGS)
    assert [one["type"] for one in fields["options"]["anyOf"]] == ["string", "object"]
