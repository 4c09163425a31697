"""What an engine refuses, and where it fails, leaves the client as an error for people: against a
small stand-in for an engine, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.backends.container.client import ContainerClient
from flows.backends.container.options import ContainerOptions
from flows.backends.container.render import ContainerRequest, Host, render_container
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError

IMAGE = "registry.example.org/yard/cuda:1"
NO_IMAGE = (404, {"message": f"No such image: {IMAGE}"})
MADE = (201, {"Id": "c1", "Warnings": []})
Answer = tuple[int, object]


class Engine(ThreadingHTTPServer):
    """Gives what was planned for a path, one after another; the last one again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plan: dict[str, list[Answer]] = {}
        self.otherwise: Answer = (500, {"message": "not planned"})

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str) -> Answer:
        if path.endswith("/version"):
            return 200, {"ApiVersion": "1.41"}
        name = next((name for name in self.plan if path.endswith(name)), "")
        answers = self.plan.get(name) or [self.otherwise]
        return answers.pop(0) if len(answers) > 1 else answers[0]


class _Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet: the second of two would wait for an answer

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.answer(self.path.partition("?")[0])
        lines = body if isinstance(body, list) else [body]
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = json.dumps(line).encode() + b"\r\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(engine: Engine) -> Iterator[ContainerClient]:
    opened = ContainerClient(engine.address)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def request_to_make() -> ContainerRequest:
    spec = LaunchSpec(name="j", command=("x",), run_directory="/y/r", key="k-1", image=IMAGE)
    return render_container(spec, ContainerOptions(), Host(user="1:1", environment={}))


# --- pulling --------------------------------------------------------------------------------------

BEGUN = {"status": "Pulling fs layer", "id": "ab"}


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        ("write /layer: no space left on device", InfrastructureError, "disk .* is full"),
        ("read tcp: connection reset by peer", InfrastructureError, "registry became unavailable"),
        ("no matching manifest for linux/arm64", ConfigError, "docker pull"),
    ],
)
def test_a_pull_that_fails_after_it_began_is_told_with_its_reason(
    engine: Engine,
    client: ContainerClient,
    request_to_make: ContainerRequest,
    words: str,
    kind: type[Exception],
    told: str,
) -> None:
    failed = {"errorDetail": {"message": words}, "error": words}
    engine.plan = {"/containers/create": [NO_IMAGE], "/images/create": [(200, [BEGUN, failed])]}
    with pytest.raises(kind, match=told) as caught:
        client.create(request_to_make, {}, may_pull=True)
    assert words in str(caught.value)


def test_an_image_that_was_pulled_is_used(
    engine: Engine, client: ContainerClient, request_to_make: ContainerRequest
) -> None:
    engine.plan = {"/containers/create": [NO_IMAGE, MADE], "/images/create": [(200, [BEGUN])]}
    client.create(request_to_make, {}, may_pull=True)


def test_another_flow_that_was_quicker_after_the_pull_is_no_error(
    engine: Engine, client: ContainerClient, request_to_make: ContainerRequest
) -> None:
    taken = (409, {"message": "the name is already in use"})
    engine.plan = {"/containers/create": [NO_IMAGE, taken], "/images/create": [(200, [BEGUN])]}
    client.create(request_to_make, {}, may_pull=True)


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        ((500, {"message": "could not select device driver"}), ConfigError, "NVIDIA"),
        ((500, {"message": "devmapper: broken"}), InfrastructureError, "devmapper: broken"),
        (NO_IMAGE, ConfigError, "it was pulled just now"),
    ],
)
def test_what_is_refused_after_the_pull_is_told_as_before_it(
    engine: Engine,
    client: ContainerClient,
    request_to_make: ContainerRequest,
    answer: Answer,
    kind: type[Exception],
    told: str,
) -> None:
    engine.plan = {"/containers/create": [NO_IMAGE, answer], "/images/create": [(200, [BEGUN])]}
    with pytest.raises(kind, match=told):
        client.create(request_to_make, {}, may_pull=True)


# --- all else -------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[ContainerClient], object]] = {
    "look": lambda client: client.look("c1"),
    "own": lambda client: list(client.own()),
    "start": lambda client: client.start("c1"),
    "signal": lambda client: client.signal("c1", "SIGTERM"),
    "remove": lambda client: client.remove("c1"),
    "output": lambda client: list(client.output("c1")),
}


@pytest.mark.parametrize("status", [400, 404, 503])
@pytest.mark.parametrize("asked", ASKED)
def test_errors_are_ours(engine: Engine, client: ContainerClient, asked: str, status: int) -> None:
    engine.otherwise = (status, {"message": "layer store: permission denied"})
    if asked in ("look", "ours", "output") and status >= 500:
        with pytest.raises(InfrastructureError, match="layer store"):
            ASKED[asked](client)
        return
    try:
        ASKED[asked](client)
    except TrainyardError as error:
        assert "layer store" in str(error)  # noqa: PT017  # some of these are no errors
