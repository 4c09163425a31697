"""Manifests: letter by letter, by Kubernetes' own schemas, and what a cluster would not take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flows.backends.kubernetes.manifests import (
    INDEX,
    INDEX_ANNOTATION,
    KEY_LABEL,
    REPLICATED,
    SHARES,
    render_kubernetes,
    resource_name,
)
from flows.backends.kubernetes.options import Claim, KubernetesOptions, Toleration
from flows.backends.run_folder import job_key
from flows.backends.spec import KEY, NAME, LaunchSpec, Mount, Resources, Shares
from tests.flows.backends.goldens import check_golden
from tests.flows.backends.kubernetes_schemas import VERSIONS, check
from trainyard.errors import ConfigError

RUN = "/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1"
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
HOUR = 3600
GIB = 2**30

SITE = KubernetesOptions(namespace="yard", claims=(Claim(name="yard", target="/yard"),))


def spec(**values: Any) -> LaunchSpec:
    command = ("python", "-m", "stages.merge", "--config", f"{RUN}/config.toml")
    given = {"name": "merge", "command": command, "run_directory": RUN, "key": "7c1f-1"}
    return LaunchSpec(**{**given, "image": "registry.example.org/yard/cpu:0.9", **values})


TRAINING = spec(
    name="pretrain",
    key="7c1f0d9a2b3e4f56-1",
    environment={"NCCL_DEBUG": "WARN", "LITERAL": "$(HOME), $$(HOME) and $HOME"},
    mounts=(Mount(source="/data/pile", target="/pile"),),
    working_directory="/opt/yard",
    resources=Resources(
        nodes=4,
        processes_per_node=8,
        gpus_per_node=8,
        cpus_per_node=96,
        memory_bytes_per_node=1024 * GIB,
        time_limit_seconds=4 * HOUR,
    ),
)
CLUSTER = KubernetesOptions(
    namespace="yard",
    service_account="yard-stage",
    image_pull_secrets=("registry",),
    secret_environment=("store-credentials",),
    node_selector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    tolerations=(Toleration(key="nvidia.com/gpu"), Toleration(key="team", value="llm")),
    extra_resources={"rdma/ib": "8"},
    claims=(
        Claim(name="yard", target="/yard"),
        Claim(name="corpora", target="/corpora", read_only=True),
    ),
    capabilities=("IPC_LOCK",),
    priority_class="training",
)

CASES: dict[str, tuple[LaunchSpec, KubernetesOptions]] = {
    "one-process": (spec(), SITE),
    "four-nodes": (TRAINING, CLUSTER),
    "four-nodes-jobset": (
        TRAINING,
        KubernetesOptions(
            variant="jobset", queue="team-a", claims=(Claim(name="yard", target="/yard"),)
        ),
    ),
    "shares": (spec(name="tokenize", shares=Shares(count=64, at_once=8)), SITE),
    "shares-again": (
        spec(name="tokenize", shares=Shares(count=64, only=(9, 40, 3), at_once=2)),
        SITE,
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def job_of(case: str) -> dict[str, Any]:
    document = render_kubernetes(*CASES[case])[-1]
    if document["kind"] == "Job":
        return document["spec"]
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(case: str) -> dict[str, Any]:
    return job_of(case)["template"]["spec"]["containers"][0]


@every_case
def test_manifests_match_their_golden_files(case: str) -> None:
    documents = render_kubernetes(*CASES[case])
    check_golden(f"kubernetes-{case}.yaml", yaml.safe_dump_all(documents, sort_keys=False))


# --- by the official schemas ----------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@every_case
def test_a_cluster_takes_every_document(case: str, version: str) -> None:
    for document in render_kubernetes(*CASES[case]):
        check(document, version)


# --- what they say --------------------------------------------------------------------------------


def test_a_pods_rank_is_its_index_and_all_meet_at_the_first() -> None:
    service, job = render_kubernetes(*CASES["four-nodes"])
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == name == "pretrain-7c1f0d9a2b3e4f56-1"
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == name
    command = container_of("four-nodes")["command"]
    assert f"--node-rank=$({INDEX})" in command
    assert f"--master-addr={name}-0.{name}" in command
    assert "--nproc-per-node=8" in command
    index = container_of("four-nodes")["env"][0]
    assert index["name"] == INDEX
    assert INDEX_ANNOTATION in index["valueFrom"]["fieldRef"]["fieldPath"]


def test_text_of_people_is_not_expanded() -> None:
    variables = {one["name"]: one.get("value") for one in container_of("four-nodes")["env"]}
    assert variables["LITERAL"] == "$$(HOME), $$$$(HOME) and $$HOME"


def test_preemption_is_distinguished_from_failure() -> None:
    whole, share = job_of("four-nodes"), job_of("shares")
    first, second = whole["podFailurePolicy"]["rules"]
    assert first["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (first["action"], second["action"]) == ("FailJob", "FailJob")
    assert second["onExitCodes"]["values"] == [1, 2, 70]
    assert whole["backoffLimit"] == 0
    first, second = share["podFailurePolicy"]["rules"]
    assert (first["action"], second["action"]) == ("Ignore", "FailIndex")
    assert share["backoffLimitPerIndex"] == 0
    assert "backoffLimit" not in share


def test_shares_run_a_few_at_a_time_and_failed_ones_alone() -> None:
    job = job_of("shares")
    assert (job["completions"], job["parallelism"]) == (64, 8)
    assert container_of("shares")["command"][-4:] == ["--world-size", "64", "--rank", f"$({INDEX})"]
    again = job_of("shares-again")
    assert (again["completions"], again["parallelism"]) == (3, 2)
    variables = {one["name"]: one.get("value") for one in container_of("shares-again")["env"]}
    assert variables[SHARES] == "3 9 40"


@pytest.mark.parametrize(("index", "share"), [(0, 3), (1, 9), (2, 40)])
def test_a_pod_becomes_the_share_of_its_index(index: int, share: int) -> None:
    code = "import os, sys; print(os.environ['TRAINYARD_RUN_DIR'], *sys.argv[1:])"
    shares, name = Shares(count=64, only=(9, 40, 3)), "a $HOME $(id)"
    job = spec(command=(sys.executable, "-c", code, name), shares=shares)
    ended = run_pod(job, **{INDEX: str(index)})
    assert ended.stdout == f"{RUN}/share-{share} {name} --world-size 64 --rank {share}\n"
    assert ended.returncode == 0


def run_pod(job: LaunchSpec, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a pod of a job runs, here; over its own variables come those of environment."""
    container = render_kubernetes(job, SITE)[-1]["spec"]["template"]["spec"]["containers"][0]
    variables = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    words = [word.replace("$$", "$") for word in container["command"]]  # as a kubelet does
    given = {"PATH": os.environ["PATH"], **variables, **environment}
    return subprocess.run(words, env=given, capture_output=True, text=True, check=False)


def test_a_replacement_pod_starts_without_the_report_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "failure.json").write_text('{"class": "Stopped"}')
    (tmp_path / "config.toml").write_text("")
    job = spec(command=(sys.executable, "-c", "exit(7)"))
    assert run_pod(job, TRAINYARD_RUN_DIR=str(tmp_path)).returncode == 7
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


def test_a_program_that_the_image_lacks_is_a_wrong_option(tmp_path: Path) -> None:
    job = spec(command=("no-such-python", "-m", "stages.merge"))
    ended = run_pod(job, TRAINYARD_RUN_DIR=str(tmp_path))
    assert ended.returncode == ConfigError.exit_status
    assert "no-such-python: the image has no such program" in ended.stderr


def test_pods_of_several_nodes_remove_no_report() -> None:
    for case in ("four-nodes", "four-nodes-jobset"):
        assert "failure.json" not in str(container_of(case)["command"])


@every_case
def test_pods_are_not_root_and_write_to_volumes_alone(case: str) -> None:
    pod, container = job_of(case)["template"]["spec"], container_of(case)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] >= 1
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert pod["automountServiceAccountToken"] is False
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts >= {"/dev/shm", "/tmp", "/yard"}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_gpus_and_memory_are_asked_for_and_bounded() -> None:
    resources = container_of("four-nodes")["resources"]
    bounded = {"memory": "1048576Mi", "nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert resources["limits"] == bounded
    assert resources["requests"] == {**bounded, "cpu": "96"}


# --- names ----------------------------------------------------------------------------------------

names = st.from_regex(NAME, fullmatch=True).filter(lambda name: len(name) < 200)


keys = st.builds(job_key, st.just("run"), names, st.integers(1, 999)) | st.from_regex(
    KEY, fullmatch=True
)


@given(names, keys)
def test_every_name_is_a_dns_label_with_room_for_what_pods_add(name: str, key: str) -> None:
    resource = resource_name(spec(name=name, key=key))
    assert DNS_LABEL.fullmatch(f"{resource}-99999")
    # What JobSet's webhook looks at: the name of the last pod, and five letters by chance.
    assert DNS_LABEL.fullmatch(f"{resource}-{REPLICATED}-0-99999-abcde")
    assert resource.endswith(f"-{key}")


def test_each_attempt_has_a_name_of_its_own_also_where_names_are_cut() -> None:
    long = "tokenize-" + "x" * 80
    found = {
        resource_name(spec(name=name, key=job_key("run", "task", n)))
        for name in (f"{long}-1", f"{long}-2")
        for n in (1, 2)
    }
    assert len(found) == 4


def test_a_queue_gets_the_job_and_not_its_pods_one_by_one() -> None:
    (jobset,) = render_kubernetes(*CASES["four-nodes-jobset"])
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert jobset["spec"]["suspend"] is True
    assert str(jobset).count("kueue.x-k8s.io") == 1


def test_all_that_belongs_to_a_submission_is_found_by_its_key() -> None:
    for document in render_kubernetes(*CASES["four-nodes"]):
        assert document["metadata"]["labels"][KEY_LABEL] == "7c1f0d9a2b3e4f56-1"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"key": ""}, "needs a key"),
        ({"image": None}, "Kubernetes runs images"),
        ({"run_directory": "/elsewhere/run"}, r"is on no volume of the pods \(/yard\)"),
    ],
)
def test_jobs_that_kubernetes_cannot_run_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_kubernetes(spec(**values), SITE)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("namespace", "My_Yard", "option namespace: 'My_Yard'"),
        ("variant", "pytorchjob", "'pytorchjob' is not one of auto, job, jobset"),
        ("user", 0, "0 is root"),
        ("shared_memory", "16 GB", "option shared_memory"),
        ("node_selector", {"a b": "c"}, "option node_selector"),
        ("node_selector", {"zone": "a b"}, "option node_selector zone"),
        ("extra_resources", {"rdma/ib": "many"}, "option extra_resources rdma/ib"),
        ("image_pull_secrets", ("My Secret",), "option image_pull_secrets"),
        ("capabilities", ("sys_admin",), "option capabilities"),
        ("keep_seconds", -1, "keep_seconds must not be negative"),
    ],
)
def test_invalid_options_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KubernetesOptions(**{option: value})


def test_claims_and_tolerations_are_looked_at_too() -> None:
    with pytest.raises(ConfigError, match="claim target"):
        Claim(name="yard", target="yard")
    with pytest.raises(ConfigError, match="'Never' is not one of NoSchedule"):
        Toleration(key="gpu", effect="Never")  # type: ignore[arg-type]
