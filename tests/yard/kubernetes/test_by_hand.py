"""The manifests that a flow kept, created again by a person, as docs/kubernetes.md says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config, utils

from flows.backends.kubernetes.manifests import MANIFESTS
from flows.recipes.summary import Summary
from flows.yard.profile import StageEnvironment
from tests.yard.jobs import FLOW_RUN, MODEL, TRAINING, wait_until, write_tokens
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import site
from tests.yard.kubernetes.test_stages import kube, run
from tests.yard.yard import ROOT
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(240)]

Person = client.ApiClient
NAMESPACE = "yard"


@pytest.fixture(autouse=True)
def at_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a checkout need not be installed
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", FLOW_RUN)


@pytest.fixture
def person(fake: FakeKube) -> Iterator[Person]:
    """The official client, with the kubeconfig that kubectl would read."""
    with config.new_client_from_config(str(fake.kubeconfig)) as api:
        yield api


def create(person: Person, file: Path) -> list[Any]:
    """kubectl create -f"""
    made: list[Any] = utils.create_from_yaml(person, str(file), namespace=NAMESPACE)
    return made


def delete(person: Person, fake: FakeKube, file: Path) -> None:
    """kubectl delete -f, which waits until all of it is gone."""
    jobs, services = client.BatchV1Api(person), client.CoreV1Api(person)
    for one in yaml.safe_load_all(file.read_text()):
        name = one["metadata"]["name"]
        if one["kind"] == "Job":
            jobs.delete_namespaced_job(name, NAMESPACE, propagation_policy="Background")
        else:
            services.delete_namespaced_service(name, NAMESPACE)
    wait_until(lambda: not any(fake.all(kind) for kind in ("jobs", "services", "pods")))


def ended(fake: FakeKube, name: str) -> Callable[[], dict[str, Any] | None]:
    """How a Job ended, when it has: its Complete or Failed condition."""

    def find() -> dict[str, Any] | None:
        (job,) = [one for one in fake.all("jobs") if one["metadata"]["name"] == name]
        conditions = job.get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] in ("Complete", "Failed")), None)

    return find


def outcome(folder: Path) -> dict[str, Any]:
    """The last line of the stage itself."""
    document: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return document


def run_by_hand(person: Person, fake: FakeKube, file: Path) -> dict[str, Any]:
    """Create what was kept, wait for its end, and remove it; the output of the stage."""
    (file.parent / "outcome.json").unlink(missing_ok=True)
    *_, job = create(person, file)
    assert job[0].kind == "Job"
    assert file.parent.name in job[0].metadata.name
    find = ended(fake, job[0].metadata.name)
    wait_until(find)
    end = find()
    assert end is not None
    assert end["type"] == "Complete", end
    delete(person, fake, file)
    return outcome(file.parent)


def check_by_hand(person: Person, fake: FakeKube, first: Summary, output: Path) -> None:
    """Twice: with the output there, and gone."""
    file = Path(first.log).with_name(MANIFESTS)
    kept = file.read_bytes()
    assert not first.reused
    wait_until(lambda: not fake.all("jobs"))  # went well: the flow has removed it
    assert run_by_hand(person, fake, file)["outcome"] == "noop"
    shutil.rmtree(output)
    assert run_by_hand(person, fake, file)["outcome"] == "ran"
    found = read_manifest(f"{output}/manifest.json")
    assert found is not None
    assert found[0].output_digest == first.output_digest
    assert file.read_bytes() == kept


def test_stage_by_hand_is_a_no_op(person: Person, fake: FakeKube, tmp_path: Path) -> None:
    output = tmp_path / "plan"
    document = {**MODEL, "vocab_size": 300, "output_dir": str(output)}
    first = run("plan", document, kube(fake, tmp_path))
    check_by_hand(person, fake, first, output)


@pytest.mark.full
def test_two_nodes_make_the_same_weights(person: Person, fake: FakeKube, tmp_path: Path) -> None:
    output = tmp_path / "model"
    document = {**TRAINING, "train_iters": 20, "save_interval": 10, "save": str(output)}
    document["data_path"] = [write_tokens(tmp_path)]
    first = run("pretrain", document, kube(fake, tmp_path))
    check_by_hand(person, fake, first, output)


def test_name_is_taken_until_deletion(person: Person, fake: FakeKube, tmp_path: Path) -> None:
    """A name is of one submission: what is left of it is not written over."""
    document = {**MODEL, "vocab_size": 300, "output_dir": str(tmp_path / "plan")}
    options = site(fake, tmp_path, delete_after_success=False)
    place = StageEnvironment(
        run_folder=str(tmp_path / "runs"),
        image="yard/cpu:1",
        backend="kubernetes",
        kubernetes=options,
    )
    first = run("plan", document, place)
    file = Path(first.log).with_name(MANIFESTS)
    with pytest.raises(utils.FailToCreateError, match="AlreadyExists"):
        create(person, file)
    delete(person, fake, file)
    assert run_by_hand(person, fake, file)["outcome"] == "noop"
