"""A flow waits for an absent API server or engine, and its job is neither lost nor restarted."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.backends.container import job as container_job
from flows.backends.container.options import ContainerOptions
from flows.backends.kubernetes.client import KubernetesClient
from flows.backends.kubernetes.job import KubernetesJob
from flows.backends.outcome import Kind
from flows.runner import retry, submission
from flows.runner.job_blocks import StageJobBlock
from flows.yard.profile import StageEnvironment
from tests.yard.container import containers as engines
from tests.yard.container.containers import counting, steps_of, text_of
from tests.yard.faults.wire import Wire
from tests.yard.jobs import wait_until
from tests.yard.kubernetes.fake_kube import FakeKube
from tests.yard.kubernetes.kube import job, log_of, says, training

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]

LOOKS = 5
"""More than there are attempts, each of which fails."""


class Impatient(KubernetesJob):
    """Waits a moment for a server."""

    _block_type_name = "Very Impatient Kubernetes Job"
    _block_type_slug = "very-impatient-kubernetes-job"

    def client(self) -> KubernetesClient:
        options = self.options
        return KubernetesClient(options.namespace, options.kubeconfig, None, 0.2)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """Polls that found the backend unavailable; each is logged, and the next follows at once."""
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.1,))
    monkeypatch.setattr(submission, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(submission, "get_run_logger", lambda: logging.getLogger("followed"))

    def count() -> int:
        return sum(getattr(one, "headline", "") == "waits" for one in caplog.records)

    return count


def follow(
    name: str, block: StageJobBlock, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[], None]
) -> Kind:
    """As the task of a stage does; the trouble happens meanwhile."""
    monkeypatch.setitem(submission.JOB_BLOCKS, name, lambda place, spec, stage: block)
    place = StageEnvironment(run_folder=str(Path(block.spec.run_directory).parent), backend=name)
    happening = threading.Thread(target=trouble)
    happening.start()
    outcome = asyncio.run(submission.follow("pretrain", place, block.spec))
    happening.join()
    return outcome.kind


def test_a_job_survives_an_api_server_outage_longer_than_all_attempts(
    fake: FakeKube, tmp_path: Path, looks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job(fake, tmp_path, "unseen-1", training(60))
    block = Impatient(spec=whole.spec, options=whole.options)

    def trouble() -> None:
        wait_until(says(block, "step 3"))
        fake.is_away = True
        fake.drop_streams()
        wait_until(lambda: looks() >= LOOKS)
        fake.is_away = False

    assert follow("kubernetes", block, monkeypatch, trouble) is Kind.DONE
    assert log_of(block).read_text() == "".join(f"step {number}\n" for number in range(60))
    assert len([path for method, path in fake.asked if method == "POST"]) == 1


def test_a_job_survives_an_engine_outage_longer_than_all_attempts(
    tmp_path: Path,
    key: str,
    image: str,
    looks: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container_job, "AWAY_SECONDS", 0.2)
    wire = Wire(os.environ["DOCKER_HOST"], tmp_path)
    options = ContainerOptions(pull="never", engine=wire.address)
    block = engines.job(tmp_path, key, image, counting(40), options=options, poll_seconds=0.2)

    def trouble() -> None:
        wait_until(lambda: "step 3\n" in text_of(block))
        wire.cut()
        wait_until(lambda: looks() >= LOOKS)
        wire.mend()

    assert follow("container", block, monkeypatch, trouble) is Kind.DONE
    assert steps_of(block) == list(range(40))
    assert text_of(block, "starts") == "start\n"
