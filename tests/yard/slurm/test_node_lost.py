"""A training on two nodes of Slurm that loses one of them is retried and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yard.operator.deployed import comes
from tests.yard.slurm.cluster import Cluster, ask
from tests.yard.slurm.test_preempted import goes_on

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(1800)]

STEPS = 8000
"""Made in longer than Slurm takes to find out about anything late."""


ONE, TWO = ["done"], ["node failure", "done"]
"""How the submissions end."""


@pytest.mark.parametrize(
    ("option", "kinds"),
    # What Slurm says late to the lost run may end the next one, which its flow then submits again.
    [('requeue = "requeue"', [ONE, TWO]), ('requeue = "no-requeue"', [TWO])],
    ids=["by Slurm", "by its flow"],
)
def test_a_training_that_lost_a_node_resumes_on_two_nodes(
    cluster: Cluster, tmp_path: Path, option: str, kinds: list[list[str]]
) -> None:
    def lose_a_node() -> None:
        cluster.power_off("node2")
        assert comes(120, is_known)
        cluster.up(wait=False)

    def is_known() -> bool:
        return "down" in ask("sinfo", "--noheader", "--nodes=node2", "--format=%T")

    went = goes_on(tmp_path, "debug", lose_a_node, STEPS, option)
    assert went.kinds in kinds
