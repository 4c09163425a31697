"""The command line of the registration, as far as it goes without a server."""

from __future__ import annotations

import pytest

from flows.register.command import main


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_without_a_server_it_says_which_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--yard", "local"]) == 2
    assert "PREFECT_API_URL is not set" in capsys.readouterr().err


def test_a_yard_that_is_none_is_refused_before_any_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--yard", "lokal"]) == 2
    assert "did you mean 'local'" in capsys.readouterr().err
