"""The schemas find faults in manifests, and our schema of JobSet has JobSet's fields."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args, get_origin

import pytest

from flows.backends.kubernetes.manifests import render_kubernetes
from tests.flows.backends.kubernetes.test_manifests import CASES
from tests.flows.backends.kubernetes_schemas import (
    JOBSET,
    VERSIONS,
    NoSchemaError,
    ValidationError,
    check,
)

POD = ("template", "spec")
SPEC = ("spec", "replicatedJobs", 0, "template", "spec")
GONE = object()


def changed(case: str, path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A manifest with one fault in it; its parts on the way are made where they are not there."""
    document = deepcopy(render_kubernetes(*CASES[case])[-1])
    at: Any = document
    for step in path[:-1]:
        at = at.setdefault(step, {}) if isinstance(at, dict) else at[step]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return document


FAULTS: list[tuple[tuple[str | int, ...], object, str]] = [
    # no such field
    (("spec", "replicas"), 1, "'replicas' was unexpected"),
    (("spec", "network", "subDomain"), "a", "'subDomain' was unexpected"),
    (("spec", "replicatedJobs", 0, "completions"), 4, "'completions' was unexpected"),
    (("spec", "replicatedJobs", 0, "template", "metadata", "uid"), "a", "'uid' was unexpected"),
    ((*SPEC, "paralelism"), 4, "'paralelism' was unexpected"),
    ((*SPEC, *POD, "containers", 0, "imagePullSecrets"), [], "was unexpected"),
    # wrong type
    (("spec", "suspend"), "true", "'true' is not of type 'boolean'"),
    (("spec", "failurePolicy", "maxRestarts"), "0", "'0' is not of type 'integer'"),
    (("spec", "replicatedJobs", 0, "replicas"), 1.5, "1.5 is not of type 'integer'"),
    (("spec", "replicatedJobs"), {}, "is not of type 'array'"),
    (("metadata", "labels", "a"), 1, "1 is not of type 'string'"),
    ((*SPEC, "completions"), "4", "'4' is not of type 'integer'"),
    # out of bounds
    (("spec", "ttlSecondsAfterFinished"), -1, "-1 is less than the minimum of 0"),
    (("spec", "ttlSecondsAfterFinished"), 2**31, "greater than the maximum"),
    # none of the words
    (("spec", "failurePolicy", "restartStrategy"), "Never", "'Never' is not one of"),
    (("spec", "successPolicy", "operator"), "Most", "'Most' is not one of"),
    (("spec", "startupPolicy", "startupPolicyOrder"), "Random", "'Random' is not one of"),
    ((*SPEC, "completionMode"), "indexed", "'indexed' is not one of"),
    ((*SPEC, "podFailurePolicy", "rules", 0, "action"), "FailJobSet", "is not one of"),
    ((*SPEC, *POD, "restartPolicy"), "No", "'No' is not one of"),
    # left out
    (("metadata",), GONE, "'metadata' is a required property"),
    (("spec", "replicatedJobs", 0, "name"), GONE, "'name' is a required property"),
    (("spec", "replicatedJobs", 0, "template"), GONE, "'template' is a required property"),
    ((*SPEC, "template"), GONE, "'template' is a required property"),
    ((*SPEC, *POD, "containers"), GONE, "'containers' is a required property"),
    (("spec", "successPolicy"), {}, "'operator' is a required property"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS)
def test_faulty_jobset_is_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check(changed("four-nodes-jobset", path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "backofLimit"), 1, "'backofLimit' was unexpected"),
        (("spec", "parallelism"), "4", "'4' is not of type 'integer'"),
        (("spec", "podReplacementPolicy"), "Never", "'Never' is not one of"),
        (("spec", "template"), GONE, "'template' is a required property"),
    ],
)
def test_faulty_job_is_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    for version in VERSIONS:
        with pytest.raises(ValidationError, match=message):
            check(changed("one-process", path, value), version)


def test_an_unknown_kind_is_reported() -> None:
    with pytest.raises(NoSchemaError, match="PyTorchJob of kubeflow"):
        check({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}})


# --- ours of JobSet, beside a client that is generated from JobSet's own OpenAPI ------------------

OF_KUBERNETES = ("ObjectMeta", "JobTemplateSpec", "PersistentVolumeClaim")
"""Models that Kubernetes itself has schemas of."""
TYPES = {str: "string", int: "integer", bool: "boolean"}
OF_EVERY_OBJECT = {".apiVersion", ".kind", ".metadata"}
"""JobSet's definition lets them be missing; the API server does not."""

Fields = Iterator[tuple[str, str, bool]]
"""Where a field is, its type, and whether it must be there."""


def fields_of_schema(schema: dict[str, Any], path: str = "") -> Fields:
    for name, field in schema["properties"].items():
        at, found = f"{path}.{name}", resolved(field)
        item = resolved(found.get("items", found))
        type_name = item.get("type", "string")  # a constant has none
        type_name = f"array of {type_name}" if "items" in found else type_name
        yield at, type_name, name in schema.get("required", ())
        if "properties" in item and not at.endswith(".template"):
            yield from fields_of_schema(item, at)


def resolved(field: dict[str, Any]) -> dict[str, Any]:
    where = field.get("$ref", "#")
    if where.startswith("#"):
        return JOBSET["$defs"][where.rpartition("/")[2]] if len(where) > 1 else field
    return {"type": "object"}


def fields_of_client(model: Any, path: str = "") -> Fields:
    for name, field in model.model_fields.items():
        at, type_name, form = f"{path}.{field.alias or name}", "", field.annotation
        while get_args(form):
            type_name = "array of " if get_origin(form) is list else type_name
            form = get_args(form)[0]
        yield at, type_name + TYPES.get(form, "object"), field.is_required()
        if hasattr(form, "model_fields") and not form.__name__.endswith(OF_KUBERNETES):
            yield from fields_of_client(form, at)


@pytest.mark.slow  # all of its models are imported
def test_our_schema_of_jobset_has_the_fields_that_its_own_client_has() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    ours = {one for one in fields_of_schema(JOBSET) if one[0] not in OF_EVERY_OBJECT}
    theirs = fields_of_client(models.JobsetV1alpha2JobSet)
    # Its status is what controllers write.
    sent = {one for one in theirs if not one[0].startswith((".status", *OF_EVERY_OBJECT))}
    assert ours == sent
    assert (".spec.replicatedJobs.template", "object", True) in ours
