"""`docker compose up` and `docker compose run --rm STAGE`: a real engine, a real database."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.yard.compose.composed import REGISTER, SOURCES, api, in_flow_image
from tests.yard.compose.engine import Compose, compose, docker, engine
from tests.yard.operator.scheduled import ARRIVALS, OFFERED, ONE_AT_A_TIME, every, first_of, pause
from tests.yard.server_logs import tracebacks
from tests.yard.yard import MODEL, ROOT, Yard, write_corpus
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(900)]

UP_SECONDS = 300
"""The yard is up in this time, images present."""
SCHEDULED_SECONDS = 120
"""From the registration to the end of the first scheduled run."""
RECIPE_SECONDS = 1200
"""A whole recipe: eight containers one after the other, four of which import torch."""
SERVICES = {"browse", "postgres", "server", "store", "worker"}
MANIFEST = "manifest.json"
RECIPE_STAGES = ("plan", "merge", "pretrain", "reshard", "evaluate", "benchmark", "report")
DETERMINISTIC = ("plan/", "tokens/")
OPTIONS = ("--tokenizer-type", "ByteLevelTokenizer", "--append-eod")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The yard, up."""
    with engine() as variables, compose(tmp_path_factory.mktemp("compose"), variables) as yard:
        yard.build("tokenize", "flow", "postgres", "store")
        began = time.monotonic()
        yard.run("up", "--detach", "--wait", "--no-build", seconds=UP_SECONDS)
        print(f"the yard is up after {time.monotonic() - began:.0f} s")
        yield yard
        assert tracebacks(yard.run("logs", "--no-log-prefix", "server").stdout) == []


def ask(yard: Compose, path: str, *, password: bool, token: bool, body: str = "{}") -> int:
    """HTTP status of a request that changes or reads what the server knows."""
    url = f"http://{yard.address('server', 4200)}/api/{path}"
    headers = {"Content-Type": "application/json"}
    if password:
        secret = base64.b64encode(yard.secret("PREFECT_AUTH").encode()).decode()
        headers["Authorization"] = f"Basic {secret}"
    if token:
        asked = urllib.request.Request(f"{url.split('/api/')[0]}/api/csrf-token?client=test")
        for name, value in headers.items():
            asked.add_header(name, value)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            headers["Prefect-Csrf-Token"] = json.load(answer)["token"]
        headers["Prefect-Csrf-Client"] = "test"
    request = urllib.request.Request(url, body.encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def use_store(yard: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the yard's store from here."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{yard.address('store', 8333)}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", yard.secret("YARD_S3_KEY_ID"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", yard.secret("YARD_S3_SECRET"))


def output_digest(url: str) -> str:
    found = read_manifest(url)
    assert found is not None
    return found[0].output_digest


def test_everything_is_healthy_and_the_store_was_examined(yard: Compose) -> None:
    assert yard.states() == {**dict.fromkeys(SERVICES, "healthy"), "bucket": "exit 0"}
    assert "fit for a yard" in yard.run("logs", "bucket").stdout


def test_the_server_wants_a_password_and_a_token(yard: Compose) -> None:
    assert ask(yard, "flows/filter", password=True, token=True) == 200
    assert ask(yard, "flows/filter", password=False, token=False) in (401, 403)
    assert ask(yard, "flows/filter", password=True, token=False) == 403
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(yard, "flows/filter", password=False, token=True)


def test_nothing_listens_beyond_this_machine(yard: Compose) -> None:
    names = yard.run("ps", "--quiet").stdout.split()
    documents = json.loads(docker("inspect", *names).stdout)
    ports = [one for doc in documents for one in (doc["NetworkSettings"]["Ports"] or {}).values()]
    hosts = {bound["HostIp"] for one in ports if one for bound in one}
    assert hosts == {"127.0.0.1"}


@pytest.mark.full
def test_what_the_server_knows_outlives_its_container(yard: Compose) -> None:
    assert ask(yard, "flows/", password=True, token=True, body='{"name": "kept"}') == 201
    yard.run("up", "--detach", "--wait", "--no-build", "--force-recreate", "postgres", "server")
    assert ask(yard, "flows/", password=True, token=True, body='{"name": "kept"}') == 200


def test_same_from_an_image(yard: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(yard, monkeypatch)
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, count=200, seed=7)
    source = "s3://yard/corpus.jsonl"
    store.write_bytes(source, corpus.read_bytes())

    ran = yard.stage("tokenize", "--input", source, "--output-prefix", "s3://yard/made/t", *OPTIONS)
    assert ran.returncode == 0, ran.stderr
    bare = [sys.executable, "-m", "stages.tokenize", "--input", str(corpus)]
    subprocess.run([*bare, "--output-prefix", str(tmp_path / "t"), *OPTIONS], cwd=ROOT, check=True)

    there, here = (
        output_digest("s3://yard/made/t.manifest.json"),
        output_digest(f"{tmp_path}/t.manifest.json"),
    )
    assert there == here
    assert len(there) == 64

    again = yard.stage(
        "tokenize", "--input", source, "--output-prefix", "s3://yard/made/t", *OPTIONS
    )
    assert "nothing to do" in again.stderr + again.stdout


def test_digests_are_shared(yard: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(yard, monkeypatch)
    write_corpus(tmp_path / "raw.jsonl", count=20, seed=8)
    source = "s3://yard/raw.jsonl"
    store.write_bytes(source, (tmp_path / "raw.jsonl").read_bytes())
    command = ("tokenize", "--input", source, "--output-prefix", "s3://yard/read-once/t", *OPTIONS)
    yard.stage(*command)
    entries = list((yard.home / ".digests").glob("*.json"))
    (entry,) = [one for one in entries if json.loads(one.read_text())["state"][0] == source]
    # Who read the file would not say that its contents are others than they were.
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "digest": "0" * 64}))
    again = yard.stage(*command)
    assert "-> 00000000)" in again.stderr + again.stdout


def test_browse_shows_the_store(yard: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(yard, monkeypatch)
    store.write_bytes("s3://yard/shown/card.html", b"<!doctype html>")
    url = f"http://{yard.address('browse', 4201)}/shown/"
    with urllib.request.urlopen(f"{url}card.html", timeout=10) as answer:
        assert answer.read() == b"<!doctype html>"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert b'href="./card.html"' in answer.read()
    shown = yard.run("exec", "--no-TTY", "worker", "printenv", "TRAINYARD_BROWSE").stdout
    assert shown.startswith("s3://yard=http://127.0.0.1:")


@pytest.fixture(scope="module")
def registered(yard: Compose) -> Compose:
    """The yard, with its deployments."""
    assert "deployment run-stage/compose" in in_flow_image(yard, *REGISTER)
    return yard


def test_checks_of_the_yard_pass_from_within(registered: Compose) -> None:
    # Not "store closed": this store is open to all. All are in test_own_store.py.
    checks = ("store", "conditional writes", "clock", "Prefect", "versions", "auth", "work pool")
    more = ("slots", "schedules", "jobs", "text")
    of_ranks = ("shared memory", "GPUs")
    only = [word for name in (*checks, *more, *of_ranks) for word in ("--only", name)]
    output = in_flow_image(registered, "python", "-m", "flows.doctor", "--yard", "compose", *only)
    count = len(checks) + len(more)
    assert output.splitlines()[-1] == f"{count} ok, {len(of_ranks)} skipped", output


def run_deployment(yard: Compose, name: str, seconds: float = 300, **parameters: str) -> None:
    given = [part for key, value in parameters.items() for part in ("--param", f"{key}={value}")]
    command = ("prefect", "deployment", "run", f"{name}/compose", *given, "--watch")
    in_flow_image(yard, *command, seconds=seconds)


def test_a_flow_makes_it_in_a_container_beside_the_worker(
    registered: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(registered, monkeypatch)
    corpus = registered.home / "flow.jsonl"
    write_corpus(corpus, count=50, seed=9)
    options = (
        f'input = ["{corpus}"]\noutput_prefix = "s3://yard/flow/t"\n'
        'tokenizer_type = "ByteLevelTokenizer"\nappend_eod = true\n'
    )
    document = registered.home / "tokenize.toml"
    document.write_text(options)
    run_deployment(registered, "run-stage", stage="tokenize", config=str(document))
    bare = [sys.executable, "-m", "stages.tokenize", "--input", str(corpus), *OPTIONS]
    subprocess.run([*bare, "--output-prefix", str(tmp_path / "t")], cwd=ROOT, check=True)
    there, here = "s3://yard/flow/t.manifest.json", str(tmp_path / "t.manifest.json")
    assert output_digest(there) == output_digest(here)


def test_schedule_refreshes_a_corpus(registered: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler on PostgreSQL, the worker, and containers beside it."""
    use_store(registered, monkeypatch)
    home, server = registered.home, api(registered)
    (home / "arrivals").mkdir()
    write_corpus(home / "arrivals" / "a.jsonl", 20, seed=1)
    (home / "nightly.toml").write_text(ARRIVALS.format(folder=home))
    profile = home / "night.toml"
    above = (ROOT / "deploy" / "yards" / "compose.toml").read_text().partition("[schedules")[0]
    above = above.replace("[pool]", f'{ONE_AT_A_TIME}name = "compose"')
    profile.write_text(OFFERED + above + every(5, recipe=str(home / "nightly.toml")))
    in_flow_image(registered, *REGISTER[:-1], str(profile))
    run = first_of(server, "corpus-refresh/night", SCHEDULED_SECONDS)
    pause(server, "corpus-refresh/night")
    log = registered.run("logs", "--tail", "60", "worker", "server").stdout
    assert run is not None, log
    assert (run["state_type"], run["auto_scheduled"]) == ("COMPLETED", True), log
    assert "versions/0001-" in store.read_bytes("s3://yard/nightly/current.json").decode()


@pytest.mark.full
@pytest.mark.timeout(2700)  # its images with torch are built first: 752 s on a busy machine
def test_a_whole_recipe_on_the_store_makes_what_processes_make(
    registered: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefect_api: dict[str, str],
) -> None:
    registered.build(*RECIPE_STAGES)
    use_store(registered, monkeypatch)
    home = registered.home
    (home / "docs").mkdir()
    write_corpus(home / "docs" / "a.jsonl", 60, seed=1)
    (home / "held.txt").write_text("the words of the train shunt their own yard before dawn. " * 9)
    text = SOURCES.format(home=home) + MODEL
    recipe = home / "tiny.toml"
    recipe.write_text(text)
    run_deployment(registered, "pretrain-gpt", RECIPE_SECONDS, recipe=str(recipe))

    there = Yard(tmp_path, prefect_api)
    done = there.pretrain(there.recipe(text))
    assert done.status == 0, done.err
    made = sorted(name for name in store.list_files(str(there.tiny)) if name.endswith(MANIFEST))
    assert len(made) > 5
    for name in made:
        if name.startswith(DETERMINISTIC):
            assert output_digest(f"s3://yard/tiny/{name}") == output_digest(f"{there.tiny}/{name}")


def test_a_wrong_option_in_an_image_ends_with_status_2(yard: Compose) -> None:
    ran = yard.stage("tokenize", "--no-such-option", check=False)
    assert ran.returncode == 2


def test_a_stage_writes_into_the_folder_of_the_yard(yard: Compose, tmp_path: Path) -> None:
    corpus = yard.home / "corpus.jsonl"
    write_corpus(corpus, count=20, seed=8)
    yard.stage("tokenize", "--input", "corpus.jsonl", "--output-prefix", "t", *OPTIONS)
    made = yard.home / "t.manifest.json"
    assert f"{made.stat().st_uid}:{made.stat().st_gid}" == yard.secret("YARD_USER")


def test_no_log_has_a_secret(yard: Compose) -> None:
    log = yard.run("logs").stdout
    for name in ("POSTGRES_PASSWORD", "YARD_S3_SECRET", "PREFECT_AUTH"):
        assert yard.secret(name).removeprefix("admin:") not in log
