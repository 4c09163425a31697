"""Errors of a container engine, from a stand-in that answers over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.backends.container.client import ContainerClient
from flows.backends.container.options import ContainerOptions
from flows.backends.container.render import Host, render_container
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError

IMAGE = "registry.example.org/yard/cuda:1"
NO_IMAGE = (404, {"message": f"No such image: {IMAGE}"})
MADE = (201, {"Id": "c1", "Warnings": []})
Answer = tuple[int, object]


class Engine(ThreadingHTTPServer):
    """Gives the planned answers of a path in order, and repeats the last one."""

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


# --- pulling --------------------------------------------------------------------------------------

BEGUN = {"status": "Pulling fs layer", "id": "ab"}
PULLED = (200, [BEGUN])
TAKEN = (409, {"message": "the name is already in use"})


def fails(message: str) -> Answer:
    """A pull that fails after it began."""
    return 200, [BEGUN, {"errorDetail": {"message": message}, "error": message}]


def pull(engine: Engine, client: ContainerClient, pulled: Answer, *created: Answer) -> None:
    """Create a container whose image the engine pulls first."""
    engine.plan = {"/containers/create": [NO_IMAGE, *created], "/images/create": [pulled]}
    spec = LaunchSpec(name="j", command=("x",), run_directory="/y/r", key="k-1", image=IMAGE)
    request = render_container(spec, ContainerOptions(), Host(user="1:1", environment={}))
    client.create(request, {}, may_pull=True)


FULL = "write /layer: no space left on device"
RESET = "read tcp: connection reset by peer"
NO_MANIFEST = "no matching manifest for linux/arm64"
NO_DRIVER = (500, {"message": "could not select device driver"})
NO_PROGRAM = (400, {"message": 'runc: exec: "/x/y": stat /x/y: no such file or directory'})
BROKEN = (500, {"message": "devmapper: broken"})
NOT_MOUNTED = (500, {"message": "error creating overlay mount: no such file or directory"})


@pytest.mark.parametrize(
    ("pulled", "created", "kind", "message"),
    [
        (fails(FULL), [], InfrastructureError, f"disk .* is full.*{FULL}"),
        (fails(RESET), [], InfrastructureError, f"{RESET}.*registry became unavailable"),
        (fails(NO_MANIFEST), [], ConfigError, f"{NO_MANIFEST}.*docker pull"),
        (PULLED, [NO_DRIVER], ConfigError, "NVIDIA"),
        (PULLED, [NO_PROGRAM], ConfigError, "no such program"),
        (PULLED, [BROKEN], InfrastructureError, "devmapper: broken"),
        (PULLED, [NOT_MOUNTED], InfrastructureError, "overlay mount"),
        (PULLED, [NO_IMAGE], ConfigError, "it was pulled just now"),
    ],
)
def test_failed_pull_or_creation_names_its_reason(
    engine: Engine,
    client: ContainerClient,
    pulled: Answer,
    created: list[Answer],
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        pull(engine, client, pulled, *created)


@pytest.mark.parametrize("created", [MADE, TAKEN], ids=["made", "another flow was quicker"])
def test_pulled_image_is_used(engine: Engine, client: ContainerClient, created: Answer) -> None:
    pull(engine, client, PULLED, created)


# --- all else -------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[ContainerClient], object]] = {
    "look": lambda client: client.look("c1"),
    "own": lambda client: list(client.own()),
    "start": lambda client: client.start("c1"),
    "signal": lambda client: client.signal("c1", "SIGTERM"),
    "remove": lambda client: client.remove("c1"),
    "output": lambda client: list(client.output("c1")),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("status", [400, 404, 503])
@pytest.mark.parametrize("asked", ASKED)
def test_errors_are_ours(engine: Engine, client: ContainerClient, asked: str, status: int) -> None:
    engine.otherwise = (status, {"message": "layer store: permission denied"})
    if asked in ("look", "own", "output") and status >= 500:
        with pytest.raises(InfrastructureError, match="layer store"):
            ASKED[asked](client)
        return
    try:
        ASKED[asked](client)
    except TrainyardError as error:
        assert "layer store" in str(error)  # noqa: PT017  # some of these are no errors
