"""What doctor says of a cluster: the stand-in, sound and with faults."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from flows.backends.kubernetes.manifests import JOBSET
from flows.doctor import cluster, command
from tests.yard.kubernetes.fake_kube import FakeKube, kubeconfig
from tests.yard.kubernetes.kube import profile_on_pods, profile_through
from tests.yard.operator.doctor_visits import MAY_PASS, WRONG_SETTING, Practice, Visit, seen
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.yard, pytest.mark.timeout(300)]

SLOW_TO_LOAD = f"""
import sys, time
from flows.doctor import cluster, command

class Slow:
    @staticmethod
    def find_spec(name, *_):
        if name == "{cluster.CLIENT[0]}":
            time.sleep(cluster.SECONDS)

cluster.SECONDS = 10.0
sys.meta_path.insert(0, Slow)
sys.exit(command.main(sys.argv[1:]))
"""
"""Doctor, where the client takes longer to load than the cluster has to answer."""

VERBS = {"GET": "list", "POST": "create"}
ON_TWO_NODES = "\n[resources.pretrain]\nnodes = 2\n"
JOBSETS_ONLY = f'{ON_TWO_NODES}[kubernetes]\nvariant = "jobset"'


@pytest.fixture
def practice(tmp_path: Path) -> Practice:
    return Practice(tmp_path)


@pytest.mark.full
def test_sound_cluster_with_a_slow_client(fake: FakeKube, practice: Practice) -> None:
    profile = profile_on_pods(fake, practice.folder) + ON_TWO_NODES
    found = practice.visit(profile, "jobs", "image", program=("-c", SLOW_TO_LOAD))
    assert (found.status, found.ill()) == (0, set()), found.findings
    assert "namespace yard accepts a Job" in found.findings["jobs"]["told"]
    assert found.findings["jobs"]["seconds"] > 10.0  # else this test shows nothing
    assert "--submit tries it" in found.findings["image"]["told"]


@pytest.mark.full
def test_missing_namespace_and_silent_server(fake: FakeKube, practice: Practice) -> None:
    profile = profile_on_pods(fake, practice.folder)
    found = practice.visit(profile.replace('namespace = "yard"', 'namespace = "yrad"'), "jobs")
    assert (found.status, found.ill()) == (WRONG_SETTING, {"jobs"})
    assert 'namespaces "yrad" not found' in found.message("jobs")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = practice.visit(profile_of(silent, practice.folder), "jobs")
    assert (found.status, found.ill()) == (MAY_PASS, {"jobs"})
    assert "does not answer within 12 s" in found.message("jobs")


# --- faster, in this process ----------------------------------------------------------------------


def visit(profile: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Visit:
    """The command `python -m flows.doctor --yard PROFILE --only jobs --json`."""
    path = folder / "profile.toml"
    path.write_text(profile)
    status = command.main(["--yard", str(path), "--only", "jobs", "--json"])
    return seen(status, *capsys.readouterr())


def profile_of(silent: socket.socket, folder: Path) -> str:
    """Of a yard on a server that is not the stand-in."""
    there = folder / "kubeconfig"
    there.write_text(yaml.safe_dump(kubeconfig(silent.getsockname()[1], "any")))
    return profile_through(there, folder)


@pytest.mark.parametrize("has_jobsets", [False, True])
def test_the_check_leaves_nothing_and_asks_only_what_the_role_allows(
    fake: FakeKube, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_jobsets: bool
) -> None:
    fake.has_jobsets = has_jobsets
    before = {kind: fake.all(kind) for kind in ("jobs", "jobsets", "services", "pods")}
    found = visit(profile_on_pods(fake, tmp_path) + ON_TWO_NODES, tmp_path, capsys)
    assert found.status == 0, found.findings
    kind = "JobSet" if has_jobsets else "Job"
    assert found.findings["jobs"]["told"].endswith(f"accepts a {kind}")
    assert [path for _, path in fake.asked].count(f"/apis/{JOBSET}") == 1
    assert {kind: fake.all(kind) for kind in before} == before
    role, *_ = yaml.safe_load_all((ROOT / "deploy/kubernetes/rbac.yaml").read_text())
    allowed = {
        (verb, r) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]
    }
    asked = [
        (VERBS[method], path.split("/")[-1]) for method, path in fake.asked if "/yard/" in path
    ]
    made = {plural for verb, plural in asked if verb == "create"}
    assert made == ({"jobsets"} if has_jobsets else {"services", "jobs"})
    assert set(asked) <= allowed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('namespace = "yard"', 'namespace = "yrad"', 'namespaces "yrad" not found'),
        ("[kubernetes]", JOBSETS_ONLY, "the cluster has no JobSet"),
        ("claims = ", "node_selector = {}\n# ", "is on no volume of the pods"),
    ],
)
def test_a_wrong_setting_is_named(
    fake: FakeKube,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    words: str,
) -> None:
    profile = profile_on_pods(fake, tmp_path)
    found = visit(profile.replace(old, new), tmp_path, capsys)
    assert (found.status, found.ill()) == (WRONG_SETTING, {"jobs"})
    assert words in found.message("jobs")


def test_missing_right(fake: FakeKube, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.denied.add(("POST", "jobs"))
    found = visit(profile_on_pods(fake, tmp_path), tmp_path, capsys)
    assert (found.status, found.ill()) == (WRONG_SETTING, {"jobs"})
    assert "create Job in namespace yard is not allowed" in found.message("jobs")


def test_wrong_token(fake: FakeKube, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(fake.kubeconfig.read_text().replace(fake.token, "another"))
    found = visit(profile_through(wrong, tmp_path), tmp_path, capsys)
    assert (found.status, found.ill()) == (WRONG_SETTING, {"jobs"})
    assert "the cluster does not know these credentials" in found.message("jobs")


def test_a_silent_server_does_not_hang_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = visit(profile_of(silent, tmp_path), tmp_path, capsys)
    assert (found.status, found.ill()) == (MAY_PASS, {"jobs"})
    assert "does not answer within 1 s" in found.message("jobs")
