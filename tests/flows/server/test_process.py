"""A flow's own server: it starts alone, or says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.server.ephemeral import EphemeralServer
from flows.server.process import start_lock
from trainyard.errors import InfrastructureError


def test_one_server_starts_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "start.lock"
    with start_lock(lock):
        holder = lock.read_text().strip()
        words = f"process {holder} has been bringing up"
        with pytest.raises(SystemExit, match=words), start_lock(lock, 0.2):
            pass
    with start_lock(lock, 0.2):
        assert lock.read_text().strip() == holder


def test_a_home_that_cannot_be_created_gives_an_error_message(tmp_path: Path) -> None:
    (tmp_path / "yard").write_text("a file")
    with pytest.raises(InfrastructureError, match="Prefect's database cannot be kept in"):
        EphemeralServer(tmp_path / "yard" / ".prefect")


@pytest.mark.slow
def test_a_server_that_fails_to_start_quotes_its_log(tmp_path: Path) -> None:
    (tmp_path / "start.lock").mkdir()
    (tmp_path / "server.log").write_text("of yesterday\n")
    api = EphemeralServer(tmp_path)
    try:
        with pytest.raises(InfrastructureError, match="did not start: exit status 1; IsADirectory"):
            api.wait()
    finally:
        api.stop()
