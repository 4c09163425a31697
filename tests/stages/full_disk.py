"""A disk without room, for the tests of stages that check theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch, free: int = 1000) -> None:
    """Outputs find so many bytes free."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**15, free=free))
