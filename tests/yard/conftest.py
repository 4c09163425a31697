"""What the tests of whole flows share: a Prefect server, a Slurm, a cache that outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows.local_api import LocalApi
from flows.program import ENVIRONMENT
from tests.yard.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A running Prefect server: the environment that leads to it."""
    api = LocalApi(tmp_path_factory.mktemp("prefect"))
    try:
        api.wait()
        yield {**ENVIRONMENT, "PREFECT_API_URL": api.url}
    finally:
        api.stop()


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of digests that lasts from one test of a module to the next."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running Slurm of two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
