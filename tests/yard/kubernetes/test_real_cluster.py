"""The Kubernetes block on a cluster of your own.

    TRAINYARD_KUBERNETES=mysite.toml python -m pytest -m kubernetes tests/yard

The file is the profile of a yard (docs/kubernetes.md). Every object has a key that begins with
`try-` and is removed, failed ones after a minute. We have never run this on a real cluster."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.backends.kubernetes.job import KubernetesJob, KubernetesJobRun
from flows.backends.kubernetes.options import Variant
from flows.backends.outcome import Kind, Outcome
from flows.backends.spec import LaunchSpec, Resources, Shares
from flows.yard.profile import StageEnvironment
from flows.yard.read_profile import read_profile

ASKED = "TRAINYARD_KUBERNETES"

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.environ.get(ASKED), reason=f"{ASKED} names no profile of a yard on a cluster"
    ),
]

ALL_REDUCE = """
import os, torch, torch.distributed as dist
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
total = torch.tensor([2.0 ** dist.get_rank()], device="cuda" if on_gpu else "cpu")
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}", flush=True)
dist.destroy_process_group()
"""

WAITING = "import time; print('begun', flush=True); time.sleep(600)"


def site() -> StageEnvironment:
    """Where the stages of that yard run."""
    return read_profile(os.environ[ASKED]).stage_environment("try")


def block(code: str, stage: str = "plan", **values: Any) -> KubernetesJob:
    """A Python program in the image of a stage, in a run folder of its own."""
    place = site()
    key = f"try-{uuid.uuid4().hex[:8]}"
    given = {"name": "try", "command": ("python", "-c", code), "key": key}
    given |= {"run_directory": str(Path(place.run_folder, "try", key)), "resources": Resources()}
    given |= {"image": place.image_of(stage), "environment": place.environment}
    options = replace(values.pop("options", place.kubernetes), keep_seconds=60)
    return KubernetesJob(spec=LaunchSpec(**{**given, **values}), options=options)


def follow(block: KubernetesJob) -> Outcome:
    async def whole() -> Outcome:
        run = await block.trigger()
        await run.wait_for_completion()
        return await run.fetch_result()

    return asyncio.run(whole())


def log_of(block: KubernetesJob) -> str:
    return Path(block.spec.run_directory, "log.txt").read_text()


@pytest.mark.parametrize(("status", "kind"), [(0, Kind.DONE), (2, Kind.CONFIG)])
def test_the_exit_status_of_a_command_comes_back(status: int, kind: Kind) -> None:
    one = block(f"print('here'); raise SystemExit({status})")
    assert follow(one).kind is kind
    assert log_of(one) == "here\n"


@pytest.mark.parametrize("variant", ["job", "auto"])
def test_ranks_on_two_nodes_find_each_other(variant: Variant) -> None:
    wanted = site().resources_of("pretrain")
    per_node = max(1, wanted.gpus_per_node)
    two = Resources(nodes=2, processes_per_node=per_node, gpus_per_node=wanted.gpus_per_node)
    options = replace(site().kubernetes, variant=variant)
    one = block(
        ALL_REDUCE,
        "pretrain",
        resources=two,
        options=options,
        rank_launcher=("python", "-m", "torch.distributed.run"),
    )
    assert follow(one).kind is Kind.DONE, log_of(one)
    assert log_of(one).count(f": {2.0 ** (2 * per_node) - 1}") == 2 * per_node


def test_only_the_failed_share_is_named_and_made_again() -> None:
    code = "import sys; print('share', sys.argv[-1]); sys.exit(3 * (sys.argv[-1] in {}))"
    first = follow(block(code.format("('1', '2')"), shares=Shares(count=4, at_once=2)))
    assert (first.kind, first.failed_shares) == (Kind.INFRASTRUCTURE, (1, 2))
    again = block(code.format("()"), shares=Shares(count=4, only=first.failed_shares, at_once=1))
    assert follow(again).kind is Kind.DONE
    for share in first.failed_shares:
        log = Path(again.spec.run_directory, f"log-{share:05d}.txt")
        assert log.read_text() == f"share {share}\n"


def test_a_missing_image_gives_an_error_message() -> None:
    options = replace(site().kubernetes, broken_seconds=20)
    one = block("pass", image="trainyard.invalid/no:missing", options=options)
    outcome = follow(one)
    assert outcome.kind is not Kind.DONE
    assert "image cannot be pulled" in outcome.message


def test_cancelling_leaves_nothing_and_another_flow_would_have_followed() -> None:
    one = block(WAITING, grace_seconds=5.0)

    async def whole() -> KubernetesJobRun:
        first = await one.trigger()
        waiting = asyncio.create_task(first.wait_for_completion())
        log = Path(one.spec.run_directory, "log.txt")
        while not log.exists() or "begun" not in log.read_text():
            assert not waiting.done()
            await asyncio.sleep(1)
        second = await one.trigger()
        assert second.name == first.name
        await second.stop()
        await second.wait_for_completion()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return first

    began = time.monotonic()
    asyncio.run(whole())
    assert time.monotonic() - began < 600
    assert log_of(one).count("begun") == 1
