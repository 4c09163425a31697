"""A password in the URL of Prefect's server is in no message about that server."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.cli.run_flow import of_server
from flows.doctor import server
from flows.server.outage import Outage
from trainyard.errors import TrainyardError

PASSWORD = "hunter2"

URLS = [
    f"http://trainyard:{PASSWORD}@127.0.0.1:1/api",
    f"http://{PASSWORD}@127.0.0.1:1/api",
    f"http://127.0.0.1:1/api?token={PASSWORD}",
    f"nonsense://trainyard:{PASSWORD}@127.0.0.1:1/api",
]


def asked() -> str:
    try:
        server.ask("/health")
    except TrainyardError as error:
        return str(error)
    raise AssertionError("nothing listens there")


def outage() -> str:
    said: list[str] = []
    Outage(said.append).begin()
    return said[0]


def refused() -> str:
    request = httpx.Request("GET", server.api_url())
    error = httpx.HTTPStatusError("no", request=request, response=httpx.Response(401))
    return str(of_server(error))


def away() -> str:
    return str(of_server(httpx.ConnectError(f"no route to {server.api_url()}")))


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("say", [asked, outage, refused, away])
@pytest.mark.parametrize("url", URLS)
def test_no_message_has_the_password(
    url: str, say: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    with temporary_settings({PREFECT_API_URL: url}):
        said = say()
    assert "://..." in said
    assert PASSWORD not in said
