"""What the tests of whole flows share: a Prefect server, and a cache that outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows.local_api import LocalApi
from flows.program import ENVIRONMENT


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
