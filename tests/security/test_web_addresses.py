"""Where a URL, a name and a redirect may lead: to no metadata service, and within a server."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.recipes.recipe import read_recipe
from tests.web import Handler, web_server
from trainyard.artifacts import store
from trainyard.artifacts.backends import http
from trainyard.artifacts.documents import read_text
from trainyard.errors import ArtifactError, ConfigError, TrainyardError

SECRET = "hunter2"

LINK_LOCAL = [
    "169.254.169.254",
    "169.254.170.2",
    "169.254.1.1:8080",
    "[fe80::1]",
    "[fe80::a9fe:a9fe]:80",
    "[febf::1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]",
    "[fd00:ec2::254]",
    "100.100.100.200",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "0xa9.254.43518",
]
"""The metadata services of clouds, and spellings of their addresses."""

READERS: list[Callable[[str], object]] = [read_recipe, read_text, store.read_bytes, store.info]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(http, "TIMEOUT_SECONDS", 5.0)


@pytest.mark.parametrize("host", LINK_LOCAL)
def test_no_url_leads_to_a_metadata_service(host: str) -> None:
    for scheme in ("http", "https"):
        for reader in READERS:
            with pytest.raises(ConfigError, match="link-local address or metadata service"):
                reader(f"{scheme}://{host}/latest/meta-data/x.toml")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254"])
def test_no_name_leads_to_a_metadata_service(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9))]
        return [*infos, (kind, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for reader in READERS:
        with pytest.raises(ConfigError, match="link-local address or metadata service"):
            reader("https://innocent.example/x.toml")


# --- redirects ------------------------------------------------------------------------------------


class Redirecting(Handler):
    """Redirects every name below /to/ to `target`."""

    target = ""

    def _answer(self, body: bool) -> None:
        if not self.path.startswith("/to/"):
            Handler._answer(self, body)
            return
        self.send_response(302)
        self.send_header("Location", self.target)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x.toml").write_text("corpus = ['other']")
    with web_server(tmp_path / "other") as url:
        yield url


def redirecting(folder: Path, target: str) -> Any:
    return web_server(folder, _answer=Redirecting._answer, target=target)


ANYWHERE = [
    *(f"http://{host}/x.toml" for host in LINK_LOCAL),
    "file:///etc/passwd",
    "ftp://127.0.0.1/x.toml",
    "data:text/plain,x",
    "gopher://127.0.0.1/x",
]


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("target", ANYWHERE)
def test_no_redirect_leads_to_a_metadata_service_or_off_the_web(
    target: str, tmp_path: Path
) -> None:
    with redirecting(tmp_path, target) as root:
        for reader in READERS:
            with pytest.raises(
                TrainyardError, match=r"link-local|no web address|status 302|another server"
            ):
                reader(f"{root}/to/x.toml")


OTHER_SERVERS = [
    "{other}/x.toml",
    "http://localhost:{port}/x.toml",
    "http://127.0.0.2:{port}/x.toml",
    "http://me:pw@127.0.0.1:{port}/x.toml",
    "//127.0.0.2:{port}/x.toml",
    "https://127.0.0.1:{port}/x.toml",
    "http://h.example/x.toml?sig=hunter2",
]


@pytest.mark.parametrize("pattern", OTHER_SERVERS)
def test_a_document_is_not_read_from_where_its_server_redirects(
    pattern: str, elsewhere: str, tmp_path: Path
) -> None:
    target = pattern.format(other=elsewhere, port=elsewhere.rpartition(":")[2])
    with redirecting(tmp_path, target) as root:
        for reader in (read_recipe, read_text):
            with pytest.raises(ConfigError, match="redirects to another server") as caught:
                reader(f"{root}/to/x.toml")
            assert SECRET not in str(caught.value)


def test_a_document_may_move_within_its_server(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("corpus = ['here']")
    with redirecting(tmp_path, "/x.toml") as root:
        assert read_recipe(f"{root}/to/x.toml").corpus == ("here",)


def test_data_may_come_from_another_server_that_is_not_this_machine(
    elsewhere: str, tmp_path: Path
) -> None:
    with redirecting(tmp_path, f"{elsewhere}/x.toml") as root:
        assert store.read_bytes(f"{root}/to/x.toml") == b"corpus = ['other']"
    port = elsewhere.rpartition(":")[2]
    for name in ("localhost", "127.0.0.2", "127.1", "2130706433", "0.0.0.0", "[::1]"):
        with (
            redirecting(tmp_path, f"http://{name}:{port}/x.toml") as root,
            pytest.raises(ConfigError, match="redirects to this machine"),
        ):
            store.read_bytes(f"{root}/to/x.toml")


def test_a_document_without_end_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "x.toml").write_text("# " + 1000 * "x")
    began = time.monotonic()
    with (
        web_server(tmp_path) as root,
        pytest.raises(ArtifactError, match="more than 100 bytes"),
    ):
        read_text(f"{root}/x.toml")
    assert time.monotonic() - began < 5
