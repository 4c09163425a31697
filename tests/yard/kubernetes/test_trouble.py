"""The Kubernetes block when a job does not start, is refused, or the server is away."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp.resolver import ThreadedResolver

from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.job import KubernetesJob
from flows.backends.kubernetes.manifests import render_kubernetes
from flows.backends.kubernetes.options import Claim
from flows.backends.outcome import Kind
from flows.backends.spec import Resources
from tests.yard.kubernetes.fake_kube import TOKEN, FakeKube
from tests.yard.kubernetes.kube import (
    TWO_NODES,
    follow,
    job,
    log_of,
    says,
    site,
    training,
    wait_until,
    when,
)
from trainyard.errors import ConfigError, InfrastructureError

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]

JOBS = "/apis/batch/v1/namespaces/yard/jobs"

# --- what does not start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "options", "values", "kind", "words"),
    [
        ("image", {}, {"image": "yard/cpu:missing"}, Kind.CONFIG, "image cannot be pulled"),
        (
            "secret",
            {"secret_environment": ("store",)},
            {},
            Kind.CONFIG,
            'CreateContainerConfigError.*secret "store" not found',
        ),
        ("room", {"node_selector": {"disk": "none"}}, {}, Kind.INFRASTRUCTURE, "no node has room"),
    ],
)
def test_an_obstacle_is_logged_at_once_and_stops_the_job(
    fake: FakeKube,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    key: str,
    options: dict[str, Any],
    values: dict[str, Any],
    kind: Kind,
    words: str,
) -> None:
    limits = {"broken_seconds": 1, "room_seconds": 1, **options}
    chosen = site(fake, tmp_path, **limits)
    outcome = follow(job(fake, tmp_path, f"start-{key}", "pass", options=chosen, **values))
    assert outcome.kind is kind
    assert len([r for r in caplog.records if "does not start" in r.message]) == 1
    assert re.search(words, outcome.message), outcome.message
    assert not [one for one in fake.all("jobs") if f"start-{key}" in one["metadata"]["name"]]


def test_a_missing_claim_is_a_wrong_option(fake: FakeKube, tmp_path: Path) -> None:
    claims = (Claim(name="nowhere", target=str(tmp_path)),)
    options = site(fake, tmp_path, claims=claims, broken_seconds=1)
    outcome = follow(job(fake, tmp_path, "claim-1", "pass", options=options))
    assert (outcome.kind, outcome.exit_status) == (Kind.CONFIG, 2)
    assert 'persistentvolumeclaim "nowhere" not found' in outcome.message


@pytest.mark.full
def test_quota_is_awaited(fake: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake.cluster.quota = "pods is forbidden: exceeded quota: yard"

    def warned() -> bool:
        return any("exceeded quota" in record.message for record in caplog.records)

    def give() -> None:
        fake.cluster.quota = ""

    assert follow(job(fake, tmp_path, "quota-1", "pass"), when(warned, give)).kind is Kind.DONE


QUOTA = "exceeded quota: yard, requested: count/jobs.batch=1, used: count/jobs.batch=9, limited: 9"


def of_quota(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "exceeded quota" in record.message]


def test_a_job_that_a_quota_refuses_is_created_when_there_is_room(
    fake: FakeKube,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flows.backends.kubernetes.job.ROOM_PAUSE_SECONDS", 0.2)
    fake.post_refusals["jobs"] = QUOTA

    def give() -> None:
        wait_until(lambda: fake.asked.count(("POST", JOBS)) >= 4)
        fake.post_refusals.clear()

    giving = threading.Thread(target=give)
    giving.start()
    outcome = follow(job(fake, tmp_path, "quota-2", "pass", **TWO_NODES))
    giving.join()
    assert outcome.kind is Kind.DONE
    assert len(of_quota(caplog)) == 1


def test_a_used_up_quota_ends_it_after_room_seconds(fake: FakeKube, tmp_path: Path) -> None:
    fake.post_refusals["jobs"] = QUOTA
    options = site(fake, tmp_path, room_seconds=1)
    began = time.monotonic()
    with pytest.raises(InfrastructureError, match=r"exceeded quota.*there was no room for 1 s"):
        follow(job(fake, tmp_path, "quota-3", "pass", options=options, **TWO_NODES))
    assert 1 <= time.monotonic() - began < 10
    assert not [one for one in fake.all("services") if "quota-3" in one["metadata"]["name"]]


def test_cancel_at_quota(fake: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake.post_refusals["jobs"] = QUOTA
    block = job(fake, tmp_path, "quota-4", "pass")

    async def cancelled() -> float:
        waiting = asyncio.create_task(block.trigger())
        await asyncio.to_thread(wait_until, lambda: of_quota(caplog))
        began = time.monotonic()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 5
    assert not fake.all("jobs")


@pytest.mark.parametrize(
    "why", ['admission webhook "deny.io" denied the request', "failed quota: must specify cpu"]
)
def test_other_refusals_end_it_at_once(fake: FakeKube, tmp_path: Path, why: str) -> None:
    fake.post_refusals["jobs"] = why
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        follow(job(fake, tmp_path, "hook-1", "pass"))
    assert "rbac" not in str(caught.value)  # no role helps
    assert fake.asked.count(("POST", JOBS)) == 1


@pytest.mark.full
def test_job_in_a_queue(fake: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    options = site(fake, tmp_path, queue="team-a")

    def was_reported() -> bool:
        return any("waits in queue team-a" in record.message for record in caplog.records)

    block = job(fake, tmp_path, "queue-1", "print('in')", options=options)
    assert follow(block, when(was_reported, fake.let_go)).kind is Kind.DONE


# --- refusals -----------------------------------------------------------------------------------


def test_wrong_credentials_end_it_at_once(fake: FakeKube, tmp_path: Path) -> None:
    config = yaml.safe_load(fake.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "old"
    (tmp_path / "old").write_text(yaml.safe_dump(config))
    options = site(fake, tmp_path, kubeconfig=str(tmp_path / "old"))
    began = time.monotonic()
    with pytest.raises(ConfigError, match="does not know these credentials"):
        follow(job(fake, tmp_path, "token-1", "pass", options=options))
    assert time.monotonic() - began < 5


def test_a_forbidden_request_is_named_with_the_role(fake: FakeKube, tmp_path: Path) -> None:
    fake.denied.add(("POST", "jobs"))
    with pytest.raises(ConfigError, match=r"create Job .* not allowed.*rbac.yaml"):
        follow(job(fake, tmp_path, "denied-1", "pass"))


def test_a_job_that_is_refused_leaves_no_service(fake: FakeKube, tmp_path: Path) -> None:
    fake.denied.add(("POST", "jobs"))
    with pytest.raises(ConfigError, match="create Job"):
        follow(job(fake, tmp_path, "denied-2", "pass", **TWO_NODES))
    assert ("POST", "/api/v1/namespaces/yard/services") in fake.asked
    assert not [one for one in fake.all("services") if "denied-2" in one["metadata"]["name"]]


def test_an_invalid_jobset_is_refused_with_its_field(fake: FakeKube, tmp_path: Path) -> None:
    fake.has_jobsets = True
    options = site(fake, tmp_path, variant="jobset")
    block = job(fake, tmp_path, "schema-1", "pass", options=options, **TWO_NODES)
    (document,) = render_kubernetes(block.spec, block.options)

    async def post(wrong: dict[str, Any]) -> None:
        client = await block.client().open()
        try:
            await client.create(wrong)
        finally:
            await client.close()

    document["spec"]["network"]["enableDnsHostnames"] = True
    with pytest.raises(ConfigError, match=r"create JobSet .* refused: .*enableDnsHostnames"):
        asyncio.run(post(document))
    assert not [one for one in fake.all("jobsets") if "schema-1" in one["metadata"]["name"]]


def test_a_long_name_is_one_that_jobset_takes(fake: FakeKube, tmp_path: Path) -> None:
    fake.has_jobsets = True
    two = {"resources": Resources(nodes=2), "rank_launcher": ("true",)}
    block = job(fake, tmp_path, "7c1f0d9a2b3e4f56-1", "pass", **two)
    block.spec = replace(block.spec, name="pretrain-" + "x" * 60)
    assert follow(block).kind is Kind.DONE
    assert [path for verb, path in fake.asked if verb == "POST" and path.endswith("/jobsets")]


def test_a_missing_namespace_is_named(fake: FakeKube, tmp_path: Path) -> None:
    options = site(fake, tmp_path, namespace="nowhere")
    with pytest.raises(ConfigError, match='namespaces "nowhere" not found'):
        follow(job(fake, tmp_path, "space-1", "pass", options=options))


def test_no_kubeconfig(fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    options = site(fake, tmp_path, kubeconfig=None)
    with pytest.raises(ConfigError, match="set KUBECONFIG or the option kubeconfig"):
        follow(job(fake, tmp_path, "access-1", "pass", options=options))


# --- a server at fault --------------------------------------------------------------------------


def test_broken_watches_and_logs_resume(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "broken-1", training(40))

    def trouble() -> None:
        for forget in (False, True, True):
            fake.drop_streams(forget)
            time.sleep(0.7)

    assert follow(block, when(says(block, "step 3"), trouble)).kind is Kind.DONE
    log = log_of(block).read_text()
    assert log == "".join(f"step {number}\n" for number in range(40))


def test_a_replaced_token_is_read_again(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "renew-1", training(30))
    first = fake.kubeconfig.read_text()

    def replace_token() -> None:
        fake.kubeconfig.write_text(first.replace(fake.token, "another"))
        fake.token = "another"
        fake.drop_streams()

    try:
        outcome = follow(block, when(says(block, "step 3"), replace_token))
    finally:
        fake.token = TOKEN
        fake.kubeconfig.write_text(first)
    assert outcome.kind is Kind.DONE
    assert log_of(block).read_text() == "".join(f"step {number}\n" for number in range(30))


def test_requests_in_flight_outlive_a_replaced_token(fake: FakeKube) -> None:
    first = fake.kubeconfig.read_text()

    async def ask_while_tokens_change() -> None:
        client = await KubernetesClient("yard", str(fake.kubeconfig)).open()
        answers = [0] * 8

        async def ask(number: int) -> None:
            while True:
                await client.find("Pod", "none")
                answers[number] += 1

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(number)) for number in range(len(answers))]
            for token in (f"token-{number}" for number in range(5)):
                before = tuple(answers)
                while any(now <= old for now, old in zip(answers, before, strict=True)):
                    await asyncio.sleep(0.01)
                fake.kubeconfig.write_text(first.replace(TOKEN, token))
                fake.token = token
            for task in asking:
                task.cancel()
        await client.close()

    try:
        asyncio.run(ask_while_tokens_change())
    finally:
        fake.token = TOKEN
        fake.kubeconfig.write_text(first)


def test_a_request_that_waits_for_dns_outlives_a_replaced_token(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, is_known = asyncio.Event(), asyncio.Event()
    look_up = ThreadedResolver.resolve

    async def slow(self: ThreadedResolver, *arguments: Any, **options: Any) -> Any:
        is_asked.set()
        await is_known.wait()
        return await look_up(self, *arguments, **options)

    async def ask_and_renew() -> tuple[list[Any], str]:
        client = await KubernetesClient("yard", str(fake.kubeconfig)).open()
        try:
            request = asyncio.create_task(client.find("Pod", "none"))
            await is_asked.wait()
            await client._renew(client._api)
            is_known.set()
            return await request
        finally:
            await client.close()

    monkeypatch.setattr(ThreadedResolver, "resolve", slow)
    first = fake.kubeconfig.read_text()
    fake.kubeconfig.write_text(first.replace("127.0.0.1", "localhost"))
    try:
        assert asyncio.run(ask_and_renew())[0] == []
    finally:
        fake.kubeconfig.write_text(first)


@pytest.mark.full
def test_requests_wait_for_an_unavailable_server(fake: FakeKube, tmp_path: Path) -> None:
    block = job(fake, tmp_path, "away-1", training(30))

    def trouble() -> None:
        fake.is_away = True
        fake.drop_streams()
        time.sleep(2)
        fake.is_away = False

    assert follow(block, when(says(block, "step 3"), trouble)).kind is Kind.DONE
    assert log_of(block).read_text().count("step 29\n") == 1


class Impatient(KubernetesJob):
    """Waits two seconds for a server."""

    _block_type_name = "Impatient Kubernetes Job"
    _block_type_slug = "impatient-kubernetes-job"

    def client(self) -> KubernetesClient:
        options = self.options
        return KubernetesClient(options.namespace, options.kubeconfig, None, 2.0)


@pytest.mark.full
def test_an_absent_server_ends_the_wait_but_not_the_job(fake: FakeKube, tmp_path: Path) -> None:
    whole = job(fake, tmp_path, "away-2", training(60))
    block = Impatient(spec=whole.spec, options=whole.options)

    def trouble() -> None:
        fake.is_away = True
        fake.drop_streams()

    with pytest.raises(BaseExceptionGroup) as caught:
        follow(block, when(says(block, "step 3"), trouble))
    assert isinstance(caught.value.exceptions[0], InfrastructureError)
    assert "has been unavailable for" in str(caught.value.exceptions[0])
    fake.is_away = False
    assert follow(block).kind is Kind.DONE
    assert log_of(block).read_text() == "".join(f"step {number}\n" for number in range(60))
    posted = [path for method, path in fake.asked if method == "POST"]
    assert len(posted) == 1


def test_hidden_events(fake: FakeKube, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake.denied.add(("GET", "events"))
    fake.cluster.quota = "no pod is created before the warning"

    def was_reported() -> bool:
        words = "list Event in namespace yard is not allowed"
        return any(words in record.message for record in caplog.records)

    def give() -> None:
        fake.cluster.quota = ""

    block = job(fake, tmp_path, "events-1", "print('ran')")
    assert follow(block, when(was_reported, give)).kind is Kind.DONE
    assert was_reported()
