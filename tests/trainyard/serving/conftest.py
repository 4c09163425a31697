"""The model and the server that these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainyard.serving.running import Running, load_tiny, running
from trainyard.inference.load import ModelOnRanks


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> ModelOnRanks:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(generator: ModelOnRanks) -> Iterator[Running]:
    with running(generator) as found:
        yield found
