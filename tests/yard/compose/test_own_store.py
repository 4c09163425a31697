"""The yard of docker-compose.yml on a store of your own, which checks credentials.

The store listens on localhost; a proxy on the gateway of the bridge leads containers to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flows.stage_configs import CONFIGS
from tests.yard.compose.composed import REGISTER
from tests.yard.compose.engine import Compose, compose, docker, engine
from tests.yard.faults.wire import Wire
from tests.yard.operator.deployed import comes
from tests.yard.operator.doctor_visits import MAY_PASS, WRONG_SETTING, Visit, seen
from tests.yard.yard import ROOT, write_corpus
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.s3, pytest.mark.timeout(900)]

HOST = "host.docker.internal"
LOOPBACK = ("127.0.0.1", "localhost")
BUCKET = "yard-tests"
SERVICES = ("browse", "postgres", "server", "worker")
UP = ("up", "--detach", "--wait", "--no-build")
SECONDS = 30
"""A stage that is not let in says so in this time, the start of its container included."""

TOKENIZE = ("--tokenizer-type", "ByteLevelTokenizer", "--append-eod")
INDEX = (
    *("--seq-length", "32", "--global-batch-size", "4", "--train-iters", "5"),
    *("--eval-iters", "0", "--split", "100,0,0"),
)
PLAN = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "8", "--vocab-size", "300"),
)


@pytest.fixture(scope="module")
def given(request: pytest.FixtureRequest) -> dict[str, str]:
    """The store, as it is reached from here."""
    if not os.environ.get("TRAINYARD_TEST_S3_ENDPOINT"):
        pytest.skip(
            "no real object store: TRAINYARD_TEST_S3_ENDPOINT, which deploy/dev/store-up.sh prints"
        )
    settings: dict[str, str] = request.getfixturevalue("s3_settings")
    return settings


def for_containers(endpoint: str) -> str:
    """The endpoint by which containers reach a store; that of one on localhost through a line."""
    address = urlsplit(endpoint)
    if address.hostname not in LOOPBACK:
        return endpoint
    gateway = "{{(index .IPAM.Config 0).Gateway}}"
    host = docker("network", "inspect", "bridge", "--format", gateway).stdout.strip()
    try:
        line = Wire(f"tcp://{address.netloc}", at=host)
    except OSError as error:
        pytest.skip(f"the engine is on another machine than the store: {host}: {error}")
    return f"http://{HOST}:{line.address.rpartition(':')[2]}"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, given: dict[str, str]) -> Iterator[Compose]:
    """The yard, up, with its deployments and the images of all stages."""
    with engine() as variables:
        settings = {
            "COMPOSE_PROFILES": "",
            "YARD_S3_ENDPOINT": for_containers(given["AWS_ENDPOINT_URL"]),
            "YARD_S3_KEY_ID": given["AWS_ACCESS_KEY_ID"],
            "YARD_S3_SECRET": given["AWS_SECRET_ACCESS_KEY"],
            "YARD_S3_REGION": given["AWS_DEFAULT_REGION"],
            "YARD_BUCKET": BUCKET,
        }
        with compose(tmp_path_factory.mktemp("own-store"), variables, **settings) as yard:
            yard.build(*(stage.replace("_", "-") for stage in CONFIGS), "flow", "postgres")
            yard.run(*UP)
            assert typed(yard, "flow", *REGISTER).returncode == 0
            yield yard


def typed(yard: Compose, service: str, *command: str) -> subprocess.CompletedProcess[str]:
    """`docker compose run --rm SERVICE ...`, as the page has it."""
    return yard.run("run", "--rm", "--no-TTY", service, *command, check=False)


def with_settings(yard: Compose, folder: Path, **values: str) -> Compose:
    """The same yard, by an .env with other values."""
    text = yard.settings.read_text()
    for name, value in values.items():
        text, count = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        assert count == 1, name
    other = replace(yard, folder=folder)
    other.settings.write_text(text)
    return other


def bare(stage: str, *options: str) -> None:
    subprocess.run([sys.executable, "-m", f"stages.{stage}", *options], cwd=ROOT, check=True)


def output_digest(url: str) -> str:
    found = read_manifest(url)
    assert found is not None, url
    return found[0].output_digest


def test_it_comes_up_without_a_store_and_without_its_bucket(yard: Compose) -> None:
    assert yard.states() == dict.fromkeys(SERVICES, "healthy")


def test_the_store_is_tried_as_the_page_says(yard: Compose) -> None:
    tried = typed(yard, "flow", "python", "deploy/dev/s3check.py", f"s3://{BUCKET}")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert tried.stdout.splitlines()[-1] == "fit for a yard"
    assert "strangers" not in tried.stdout  # it is closed, or the tests below show nothing


# --- outputs --------------------------------------------------------------------------------------


def test_stages_make_the_same_as_bare_commands(yard: Compose, s3_url: str, tmp_path: Path) -> None:
    corpus = yard.home / "own.jsonl"
    write_corpus(corpus, count=50, seed=11)
    stages = {
        "tokenize": ("--input", str(corpus), *TOKENIZE, "--output-prefix", "{root}/t"),
        "index": ("--data-path", "{root}/t_text_document", *INDEX, "--output-dir", "{root}/i"),
        "plan": (*PLAN, "--output-dir", "{root}/plan"),
    }
    for stage, words in stages.items():
        made = typed(yard, stage, *(word.format(root=s3_url) for word in words))
        assert made.returncode == 0, made.stderr
        bare(stage, *(word.format(root=tmp_path) for word in words))
    for manifest in ("t.manifest.json", "i/manifest.json", "plan/manifest.json"):
        assert output_digest(f"{s3_url}/{manifest}") == output_digest(f"{tmp_path}/{manifest}")
    again = typed(yard, "plan", *PLAN, "--output-dir", f"{s3_url}/plan")
    assert "nothing to do" in again.stderr + again.stdout


def test_a_flow_writes_to_it_from_a_container_beside_the_worker(yard: Compose, s3_url: str) -> None:
    corpus = yard.home / "flow.jsonl"
    write_corpus(corpus, count=20, seed=12)
    document = yard.home / "tokenize.toml"
    document.write_text(
        f'input = ["{corpus}"]\noutput_prefix = "{s3_url}/t"\n'
        'tokenizer_type = "ByteLevelTokenizer"\nappend_eod = true\n'
    )
    run = ("prefect", "deployment", "run", "run-stage/compose", "--watch")
    parameters = ("--param", "stage=tokenize", "--param", f"config={document}")
    ended = typed(yard, "flow", *run, *parameters)
    assert ended.returncode == 0, ended.stdout + yard.run("logs", "worker").stdout
    assert len(output_digest(f"{s3_url}/t.manifest.json")) == 64


# --- who is not let in ----------------------------------------------------------------------------

WRONG = (
    ("YARD_S3_SECRET", "wrong", WRONG_SETTING, "AWS_SECRET_ACCESS_KEY"),
    ("YARD_S3_KEY_ID", "nobody", WRONG_SETTING, "AWS_ACCESS_KEY_ID"),
    ("YARD_S3_ENDPOINT", f"http://{HOST}:9", MAY_PASS, "the store cannot be reached"),
)


@pytest.mark.parametrize(("name", "value", "status", "words"), WRONG)
def test_a_wrong_setting_ends_a_stage_in_seconds_and_is_named(
    yard: Compose, s3_url: str, tmp_path: Path, name: str, value: str, status: int, words: str
) -> None:
    other = with_settings(yard, tmp_path, **{name: value})
    began = time.monotonic()
    ended = typed(other, "plan", *PLAN, "--output-dir", f"{s3_url}/plan")
    seconds = time.monotonic() - began
    output = ended.stdout + ended.stderr
    assert ended.returncode == status, output
    assert words in output
    assert "Traceback" not in output
    assert seconds < SECONDS
    assert store.list_files(s3_url) == {}


def doctor(yard: Compose, *only: str) -> Visit:
    """`docker compose run --rm flow python -m flows.doctor`, as the page has it."""
    command = ("python", "-m", "flows.doctor", "--yard", "compose", "--json")
    done = typed(yard, "flow", *command, *(word for name in only for word in ("--only", name)))
    return seen(done.returncode, done.stdout, done.stderr)


def test_all_checks_of_the_yard_pass_from_within(yard: Compose) -> None:
    visit = doctor(yard)
    states = {name: found["state"] for name, found in visit.findings.items()}
    of_this_machine = ("disk", "limits")
    assert {states.pop(name) for name in of_this_machine} <= {"ok", "warn"}, visit.findings
    assert states.pop("GPUs") == "skipped"  # no stage asks for one
    assert states == dict.fromkeys(states, "ok"), visit.findings
    assert "2 ranks" in visit.findings["ranks"]["told"]
    assert "1.0 GiB free" in visit.findings["shared memory"]["told"]


def test_doctor_names_a_wrong_secret(yard: Compose, tmp_path: Path) -> None:
    visit = doctor(with_settings(yard, tmp_path, YARD_S3_SECRET="wrong"), "store", "store closed")
    assert (visit.status, visit.ill()) == (WRONG_SETTING, {"store"})
    assert "AWS_SECRET_ACCESS_KEY" in visit.message("store")
    assert visit.findings["store closed"]["state"] == "skipped"


def test_browse_reports_a_wrong_secret(yard: Compose, s3_url: str, tmp_path: Path) -> None:
    store.write_bytes(f"{s3_url}/card.html", b"<!doctype html>")
    path = f"{s3_url.partition(BUCKET)[2].lstrip('/')}/card.html"
    try:
        # Mostly it counts as unhealthy; for a moment before the refusal it is healthy.
        with_settings(yard, tmp_path, YARD_S3_SECRET="wrong").run(*UP, check=False)
        assert comes(60, lambda: "AWS_SECRET_ACCESS_KEY" in yard.run("logs", "browse").stdout)
    finally:
        yard.run(*UP)
    assert yard.states() == dict.fromkeys(SERVICES, "healthy")
    with urllib.request.urlopen(
        f"http://{yard.address('browse', 4201)}/{path}", timeout=20
    ) as read:
        assert read.read() == b"<!doctype html>"


def test_no_log_and_no_run_folder_has_the_secret(yard: Compose) -> None:
    secret = yard.secret("YARD_S3_SECRET")
    assert secret not in yard.run("logs").stdout
    kept = [path for path in yard.home.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if secret.encode() in path.read_bytes()]
