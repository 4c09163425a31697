"""A node that cannot open the job's log: Slurm's `0:53`, before the script begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm.options import SlurmOptions
from tests.yard.jobs import follow
from tests.yard.slurm.cluster import Cluster, ask, job

pytestmark = [pytest.mark.yard, pytest.mark.timeout(120)]

HIDDEN = ("mount", "-t", "tmpfs", "none")
READ_ONLY = ("mount", "-t", "tmpfs", "-o", "ro", "none")


@contextmanager
def mounted(cluster: Cluster, node: str, mount: tuple[str, ...], folder: Path) -> Iterator[None]:
    """A node that has something else at the place of a folder."""
    cluster.on_node(node, *mount, str(folder))
    try:
        yield
    finally:
        cluster.on_node(node, "umount", str(folder))


@pytest.mark.parametrize("mount", [HIDDEN, READ_ONLY], ids=["not seen", "read-only"])
def test_job_moves_to_a_new_node(cluster: Cluster, tmp_path: Path, mount: tuple[str, ...]) -> None:
    on_node1 = SlurmOptions(nodelist="node1")
    with mounted(cluster, "node1", mount, tmp_path):
        block = job(tmp_path, "unseen-1", "print('here')", options=on_node1)
        run, outcome = follow(block)
        assert "ExitCode=0:53" in ask("scontrol", "show", "job", run.job_id)
        assert (outcome.kind, outcome.is_retryable) == (Kind.NODE_FAILURE, True)
        log = Path(block.spec.run_directory, "log.txt")
        assert f"could not open the job's log, {log}: does node1 see" in outcome.message
        elsewhere = SlurmOptions(exclude="node1")
        again = job(tmp_path, "unseen-2", "print('here')", options=elsewhere)
        assert follow(again)[1].kind is Kind.DONE
