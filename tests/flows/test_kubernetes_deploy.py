"""deploy/kubernetes: taken by Kubernetes' own schemas, and a role with what the block asks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.version import VERSION as VERSION_OF_TRAINYARD

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
VERSION = "1.34"

Document = dict[str, Any]


def documents() -> list[Document]:
    files = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "kustomization.yaml"})
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> list[Document]:
    return [one for one in documents() if one["kind"] == kind]


def validate(document: Document) -> None:
    library = pytest.importorskip("kubernetes_validate")
    library.validate(document, VERSION, strict=True)


def test_every_manifest_is_one_that_kubernetes_takes() -> None:
    found = documents()
    for document in found:
        validate(document)
    assert {one["kind"] for one in found} >= {
        *("Namespace", "ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim"),
        *("ResourceQuota", "LimitRange", "NetworkPolicy", "Deployment"),
    }


def test_the_kustomization_has_every_file() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    there = {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == there


@pytest.mark.slow
def test_kustomize_builds_what_kubernetes_takes() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    command = ["kubectl", "kustomize", str(FOLDER)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    built = list(yaml.safe_load_all(made))
    for document in built:
        validate(document)
    places = {one["metadata"].get("namespace") for one in built if one["kind"] != "Namespace"}
    (space,) = [one["metadata"]["name"] for one in built if one["kind"] == "Namespace"]
    assert places == {space}
    maps = {one["metadata"]["name"] for one in built if one["kind"] == "ConfigMap"}
    (worker,) = [one for one in built if one["kind"] == "Deployment"]
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    asked = [one["configMapRef"]["name"] for one in container["envFrom"] if "configMapRef" in one]
    assert set(asked) <= maps


ASKED = {
    "jobs": {"create", "get", "list", "watch", "delete"},
    "jobsets": {"create", "get", "list", "watch", "delete"},
    "services": {"create", "get", "patch"},
    "pods": {"list", "watch"},
    "pods/log": {"get"},
    "events": {"list"},
}
"""By flows/blocks/kubernetes_client.py."""


def test_the_role_allows_what_the_block_asks_and_nothing_else() -> None:
    (role,) = of_kind("Role")
    allowed = {one: set(rule["verbs"]) for rule in role["rules"] for one in rule["resources"]}
    assert allowed == ASKED
    (binding,) = of_kind("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] in {one["metadata"]["name"] for one in of_kind("ServiceAccount")}


def test_stages_have_no_token_and_the_worker_meets_the_strictest_policy() -> None:
    accounts = of_kind("ServiceAccount")
    assert all(one["automountServiceAccountToken"] is False for one in accounts)
    (worker,) = of_kind("Deployment")
    pod = worker["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_workers_image_is_of_this_version_and_it_knows_what_its_profile_asks_for() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (image,) = kustomization["images"]
    assert image["newTag"] == VERSION_OF_TRAINYARD  # flows refuse to go with another
    (made,) = kustomization["configMapGenerator"]
    variables = dict(line.split("=", 1) for line in made["literals"])
    assert image["newName"] == f"{variables['TRAINYARD_REGISTRY']}/flow"
    profile = (FOLDER.parent / "yards/kubernetes.toml").read_text()
    assert set(re.findall(r"\$\{(\w+)", profile)) <= variables.keys()


def test_the_yards_profile_names_what_is_there() -> None:
    import tomllib

    profile = tomllib.loads((FOLDER.parent / "yards/kubernetes.toml").read_text())["kubernetes"]
    (space,) = of_kind("Namespace")
    assert profile["namespace"] == space["metadata"]["name"]
    accounts = {one["metadata"]["name"] for one in of_kind("ServiceAccount")}
    assert profile["service_account"] in accounts
    claims = {one["metadata"]["name"] for one in of_kind("PersistentVolumeClaim")}
    assert {one["name"] for one in profile["claims"]} <= claims
    (worker,) = of_kind("Deployment")
    pod = worker["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == profile["user"]
    mounted = {one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert {one["target"] for one in profile["claims"]} <= mounted  # at the same place as in jobs
