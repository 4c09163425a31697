"""A soak's memory, and the server that it starts."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from benchmarks import served
from benchmarks.resident import growth


def test_growth_is_from_the_second_tenth_to_the_last() -> None:
    samples = [1, 1, *[100] * 2, *[500] * 14, *[102] * 2]
    assert growth(samples) == (100, 102, pytest.approx(0.02))
    with pytest.raises(ValueError, match="2 samples of the memory"):
        growth([1, 2])


def command(*then: str) -> list[str]:
    """Of a server on a port that nothing listens on."""
    lines = ["import signal, sys, time", *then]
    return [sys.executable, "-S", "-c", "\n".join(lines)]


SAYS = "print('the model is served at http://127.0.0.1:1', flush=True)"


def crash(process: int) -> None:
    """Kill a server, as its client notices."""
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    raise ConnectionError("the connection was closed")


def test_a_server_that_crashes_shows_its_log_and_what_its_client_met() -> None:
    crashes = command("print('memory is low')", SAYS, "time.sleep(60)")
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended by itself with -9:.*memory is low") as found,
        served.served(crashes) as (_, process),
    ):
        crash(process)
    assert isinstance(found.value.__cause__, ConnectionError)


def test_a_server_that_crashes_before_it_serves_shows_its_log() -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended by itself with 1:.*no such model"),
        served.served(command("sys.exit('no such model')")),
    ):
        pass


def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "END_SECONDS", 0.1)
    stuck = command("signal.signal(signal.SIGTERM, signal.SIG_IGN)", SAYS, "time.sleep(60)")
    with pytest.raises(RuntimeError, match="was killed"), served.served(stuck) as (_, process):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
