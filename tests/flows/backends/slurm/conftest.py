"""The waits of the Slurm block are short here."""

from __future__ import annotations

import pytest

from tests.flows.backends.slurm.fake_slurm import shorten_waits


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)
