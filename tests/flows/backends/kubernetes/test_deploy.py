"""deploy/kubernetes: taken by Kubernetes' own schemas, and a role with what the block asks."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from flows.backends.kubernetes.manifests import render_kubernetes
from flows.backends.kubernetes.options import Claim, KubernetesOptions
from flows.backends.spec import LaunchSpec
from flows.worker.command import LEAVE
from tests.flows.backends.kubernetes_schemas import check
from trainyard.version import VERSION as VERSION_OF_TRAINYARD

FOLDER = Path(__file__).resolve().parents[4] / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())

PROFILE = tomllib.loads((FOLDER.parent / "yards/kubernetes.toml").read_text())
FILES = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "kustomization.yaml"})
DOCUMENTS = [one for file in FILES for one in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in DOCUMENTS if one["kind"] == kind]


def names_of(kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in of_kind(kind)}


(DEPLOYMENT,) = of_kind("Deployment")
WORKER = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = WORKER["spec"]["containers"]


def test_every_manifest_is_one_that_kubernetes_takes() -> None:
    for document in DOCUMENTS:
        check(document)
    assert {one["kind"] for one in DOCUMENTS} >= {
        *("Namespace", "ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim"),
        *("ResourceQuota", "LimitRange", "NetworkPolicy", "Deployment"),
    }


# --- what kustomize makes of them, where it is not installed --------------------------------------


def test_the_kustomization_has_every_file_once_and_every_object_one_name() -> None:
    assert sorted(KUSTOMIZATION["resources"]) == [file.name for file in FILES]  # none twice
    names = [(one["kind"], one["metadata"]["name"]) for one in DOCUMENTS]
    assert len(set(names)) == len(names)


def test_the_kustomization_says_nothing_that_kustomize_does_not_know() -> None:
    assert (KUSTOMIZATION["apiVersion"], KUSTOMIZATION["kind"]) == (
        "kustomize.config.k8s.io/v1beta1",
        "Kustomization",
    )
    taken = {"namespace", "resources", "labels", "configMapGenerator", "images"}
    assert KUSTOMIZATION.keys() <= {"apiVersion", "kind", *taken}
    (label,) = KUSTOMIZATION["labels"]
    assert label.keys() == {"pairs"}  # not in selectors, which nothing can change later
    (made,) = KUSTOMIZATION["configMapGenerator"]
    assert made.keys() == {"name", "literals"}
    assert all("=" in line for line in made["literals"])


def test_one_namespace_is_meant_everywhere() -> None:
    (space,) = of_kind("Namespace")
    name = KUSTOMIZATION["namespace"]
    assert space["metadata"]["name"] == name
    given = [one["metadata"].get("namespace", name) for one in DOCUMENTS]
    assert set(given) == {name}
    (binding,) = of_kind("RoleBinding")
    assert [one["namespace"] for one in binding["subjects"]] == [name]


def test_all_that_the_worker_refers_to_is_there() -> None:
    pod, selector = WORKER["spec"], DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert selector.items() <= WORKER["metadata"]["labels"].items()
    assert pod["serviceAccountName"] in names_of("ServiceAccount")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    asked = [v["persistentVolumeClaim"] for v in volumes.values() if "persistentVolumeClaim" in v]
    assert {one["claimName"] for one in asked} <= names_of("PersistentVolumeClaim")
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == volumes.keys()
    assert CONTAINER["image"] in {one["name"] for one in KUSTOMIZATION["images"]}
    maps = {one["name"] for one in KUSTOMIZATION["configMapGenerator"]}
    sources = CONTAINER["envFrom"]
    assert {one["configMapRef"]["name"] for one in sources if "configMapRef" in one} == maps
    # Secrets are no manifests: the docs have the commands that make them.
    page = (FOLDER.parents[1] / "docs/kubernetes.md").read_text()
    for secret in (one["secretRef"]["name"] for one in sources if "secretRef" in one):
        assert f"create secret generic {secret} " in page
    assert CONTAINER["livenessProbe"]["httpGet"]["port"] in {p["name"] for p in CONTAINER["ports"]}


def test_a_worker_that_is_replaced_leaves_the_jobs_of_its_flows() -> None:
    assert CONTAINER["command"] == ["tini", "--", "python", "-m", "flows.worker", LEAVE]


def test_the_policies_of_the_network_mean_pods_that_are_made() -> None:
    spec = LaunchSpec(
        name="plan", command=("x",), run_directory="/yard/run", key="k-1", image="yard/cpu:1"
    )
    options = KubernetesOptions(claims=(Claim(name="yard", target="/yard"),))
    stage = render_kubernetes(spec, options)[-1]["spec"]["template"]["metadata"]["labels"]
    worker = WORKER["metadata"]["labels"]
    chosen = {
        one["metadata"]["name"]: one["spec"]["podSelector"]["matchLabels"].items()
        for one in of_kind("NetworkPolicy")
    }
    assert chosen["stages"] <= stage.items()
    assert not chosen["stages"] <= worker.items()
    assert chosen["worker"] <= worker.items()


@pytest.mark.slow
def test_kustomize_builds_what_kubernetes_takes() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    command = ["kubectl", "kustomize", str(FOLDER)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    built = list(yaml.safe_load_all(made))
    for document in built:
        check(document)
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
    "services": {"create", "get", "patch", "delete"},
    "pods": {"list", "watch"},
    "pods/log": {"get"},
    "events": {"list"},
}
"""By flows/backends/kubernetes/client.py."""


def test_the_role_allows_what_the_block_asks_and_nothing_else() -> None:
    (role,) = of_kind("Role")
    allowed = {one: set(rule["verbs"]) for rule in role["rules"] for one in rule["resources"]}
    assert allowed == ASKED
    (binding,) = of_kind("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] in names_of("ServiceAccount")


def test_stages_have_no_token_and_the_worker_meets_the_strictest_policy() -> None:
    accounts = of_kind("ServiceAccount")
    assert all(one["automountServiceAccountToken"] is False for one in accounts)
    pod = WORKER["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert CONTAINER["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_workers_image_is_of_this_version_and_it_knows_what_its_profile_asks_for() -> None:
    (image,) = KUSTOMIZATION["images"]
    assert image["newTag"] == VERSION_OF_TRAINYARD  # flows refuse to go with another
    (made,) = KUSTOMIZATION["configMapGenerator"]
    variables = dict(line.split("=", 1) for line in made["literals"])
    assert image["newName"] == f"{variables['TRAINYARD_REGISTRY']}/flow"
    profile = (FOLDER.parent / "yards/kubernetes.toml").read_text()
    assert set(re.findall(r"\$\{(\w+)", profile)) <= variables.keys()


def test_the_yards_profile_names_what_is_there() -> None:
    profile = PROFILE["kubernetes"]
    assert {profile["namespace"]} == names_of("Namespace")
    assert profile["service_account"] in names_of("ServiceAccount")
    assert {one["name"] for one in profile["claims"]} <= names_of("PersistentVolumeClaim")
    assert WORKER["spec"]["securityContext"]["runAsUser"] == profile["user"]
    mounted = {one["mountPath"] for one in CONTAINER["volumeMounts"]}
    assert {one["target"] for one in profile["claims"]} <= mounted  # at the same place as in jobs


def test_digests_of_raw_files_outlive_the_worker_and_the_jobs() -> None:
    variables = {one["name"]: one.get("value") for one in CONTAINER["env"]}
    folder = PROFILE["environment"]["TRAINYARD_DIGESTS"]
    assert variables["TRAINYARD_DIGESTS"] == folder
    claims = PROFILE["kubernetes"]["claims"]
    writable = [one["target"] for one in claims if not one.get("read_only")]
    assert any(PurePosixPath(folder).is_relative_to(target) for target in writable)
