"""Base images are pinned by digest, each in one place, and a registry is asked for new digests."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from images import pins

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted(
    path for folder in ("images", "deploy") for path in (ROOT / folder).rglob("*Dockerfile")
)
COMPOSE = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").rglob("compose*.yml"))]
FROM = re.compile(r"^FROM (\S+)(?: AS (\S+))?$", re.MULTILINE)
DEFAULT = re.compile(r"^ARG (\w+_IMAGE)=(\S+)$", re.MULTILINE)
OF_A_TEST = ("yard-postgres", "yard-store")


def of_others() -> list[str]:
    """References to images of others in all that is built or run."""
    found = []
    for path in DOCKERFILES:
        text = path.read_text()
        stages = {stage for _, stage in FROM.findall(text)}
        found += [one for one, _ in FROM.findall(text) if one not in stages and "$" not in one]
        found += [reference for _, reference in DEFAULT.findall(text)]
    for path in COMPOSE:
        # `!reset` is compose's own.
        services = yaml.safe_load(path.read_text().replace("!reset ", ""))["services"].values()
        named = [str(service["image"]) for service in services if "image" in service]
        found += [one for one in named if "TRAINYARD_REGISTRY" not in one and one not in OF_A_TEST]
    return found


def test_every_image_of_others_is_pinned_in_one_place() -> None:
    named = of_others()
    assert all(pins.PINNED.fullmatch(one) for one in named), named
    names = sorted(one.partition("@")[0].rpartition(":")[0] for one in named)
    assert names == [
        "chrislusf/seaweedfs",
        "debian",
        "nvcr.io/nvidia/pytorch",
        "postgres",
        "python",
    ]
    pinned = [str(one) for place in pins.PLACES for one in pins.images((ROOT / place).read_text())]
    assert sorted(pinned) == sorted(named)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("python", "https://registry-1.docker.io/v2/library/python/manifests/1"),
        ("chrislusf/seaweedfs", "https://registry-1.docker.io/v2/chrislusf/seaweedfs/manifests/1"),
        ("nvcr.io/nvidia/pytorch", "https://nvcr.io/v2/nvidia/pytorch/manifests/1"),
        ("localhost:5000/python", "http://localhost:5000/v2/python/manifests/1"),
        ("registry:5000/team/python", "https://registry:5000/v2/team/python/manifests/1"),
    ],
)
def test_a_registry_is_found_as_docker_finds_it(name: str, url: str) -> None:
    assert pins.Image(name, "1", "").manifest == url


MANIFEST = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
OLD = f"sha256:{'0' * 64}"


class Registry(BaseHTTPRequestHandler):
    """Image `team/base:1`, for who shows the token that anybody is given."""

    lies = False

    def do_GET(self) -> None:  # the name that the server looks for
        port = self.server.server_port
        if self.path.startswith("/token?"):
            assert "scope=repository%3Ateam%2Fbase%3Apull" in self.path
            return self.answer(200, b'{"token": "abc"}')
        if self.headers.get("Authorization") != "Bearer abc":
            where = f'Bearer realm="http://127.0.0.1:{port}/token",service="me"'
            scope = ',scope="repository:team/base:pull"'
            return self.answer(401, b"", {"WWW-Authenticate": where + scope})
        if self.path != "/v2/team/base/manifests/1":
            return self.answer(404, b"")
        assert self.headers["Accept"].startswith("application/vnd.oci.image.index.v1+json")
        return self.answer(200, MANIFEST, {"Docker-Content-Digest": OLD if self.lies else DIGEST})

    def answer(self, status: int, body: bytes, head: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(head or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Registry, "lies", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def place(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one file with a pin, of an image on that registry."""
    monkeypatch.setattr(pins, "ROOT", tmp_path)
    monkeypatch.setattr(pins, "PLACES", ("Dockerfile",))
    path = tmp_path / "Dockerfile"
    path.write_text(f"ARG BASE={host}/team/base:1@{OLD}\nFROM $BASE\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["pins.py", *arguments])
    return pins.main()


def test_a_moved_tag_is_reported_and_then_written(
    place: Path, host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = place.read_text()
    assert run(monkeypatch, "--check") == 1
    assert f"Dockerfile: {host}/team/base:1@{DIGEST}" in capsys.readouterr().out
    assert place.read_text() == before
    assert run(monkeypatch) == 0
    assert place.read_text() == before.replace(OLD, DIGEST)
    assert run(monkeypatch, "--check") == 0


def test_a_digest_is_that_of_what_was_sent(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Registry, "lies", True)
    before = place.read_text()
    assert run(monkeypatch) == 3
    expected = f"reports digest {OLD} but sent a manifest with digest {DIGEST}; try again"
    assert expected in capsys.readouterr().err
    assert place.read_text() == before


def test_an_image_that_is_not_there_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = place.read_text().replace("base:1", "base:2")
    place.write_text(before)
    assert run(monkeypatch) == 3
    stderr = capsys.readouterr().err
    assert "team/base:2: http://" in stderr
    assert "404" in stderr
    assert place.read_text() == before
