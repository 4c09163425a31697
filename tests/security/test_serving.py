"""A server of texts, against foreign pages, strangers and hostile requests."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.trainyard.serving.running import Running, load_tiny, running
from trainyard.inference.load import ModelOnRanks

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef0123"
JSON = {"Content-Type": "application/json"}
ASK = {"prompt": "a", "max_tokens": 1}
PUBLIC = ("/", "/page.css", "/page.js", "/health", "/v1/health", "/health/live", "/health/ready")
SECRET = "the words of a person"


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> ModelOnRanks:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(generator: ModelOnRanks) -> Iterator[Running]:
    with running(generator, max_body_bytes=20_000) as found:
        yield found


@pytest.fixture(scope="module")
def closed(generator: ModelOnRanks) -> Iterator[Running]:
    with running(generator, key=KEY) as found:
        yield found


def raw_connection(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


HOSTS = [
    ("evil.example", 421),
    ("127.0.0.1.evil.example", 421),
    ("localhost@evil.example", 400),
    ("", 400),
    ("10.0.0.1", 421),
    ("LOCALHOST", 200),
    ("127.0.0.1:1", 200),
    ("[::1]", 200),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_only_names_of_this_machine_are_answered(server: Running, host: str, status: int) -> None:
    for path in ("/health", "/", "/v1/models"):
        assert server.client.get(path, headers={"Host": host}).status_code == status, path


ORIGINS = ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1.evil.example"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_other_origins_may_not_ask(server: Running, origin: str) -> None:
    for method, path in (("POST", "/v1/completions"), ("PUT", "/api"), ("GET", "/v1/models")):
        reply = server.client.request(method, path, json=ASK, headers={"Origin": origin})
        assert reply.status_code == 403, path
        assert not [name for name in reply.headers if name.startswith("access-control")]
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    reply = server.client.options("/v1/completions", headers=preflight)
    assert reply.status_code == 403


def test_its_own_page_may(server: Running) -> None:
    headers = {"Origin": server.url}
    assert server.client.post("/v1/completions", json=ASK, headers=headers).status_code == 200


FORMS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""]


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_form_could_send_is_refused(server: Running, kind: str) -> None:
    reply = server.client.post(
        "/v1/completions", content=json.dumps(ASK), headers={"Content-Type": kind}
    )
    assert reply.status_code == 415


WRONG = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": KEY},
    {"Authorization": "Bearer \xe9"},
    {"X-Api-Key": KEY},
]


@pytest.mark.parametrize("headers", WRONG)
def test_strangers_without_the_key_learn_whether_it_lives_and_no_more(
    closed: Running, headers: dict[str, Any]
) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    for path in PUBLIC:
        assert closed.client.get(path, headers=encoded).status_code == 200, path
    for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/openapi.json", "/nothing"):
        assert closed.client.get(path, headers=encoded).status_code == 401, path
    for method, path in (("POST", "/v1/completions"), ("POST", "/completions"), ("PUT", "/api")):
        reply = closed.client.request(method, path, json=ASK, headers=encoded)
        assert reply.status_code == 401, path
        assert KEY not in reply.text
    twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")]
    assert closed.client.get("/v1/models", headers=twice).status_code == 401


def test_who_has_the_key_is_answered(closed: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert closed.client.get("/v1/models", headers=headers).status_code == 200
    assert closed.client.post("/v1/completions", json=ASK, headers=headers).status_code == 200


def test_large_bodies_are_refused_before_they_are_read(server: Running) -> None:
    declared = {**JSON, "Content-Length": "9" * 30}
    reply = httpx.post(f"{server.url}/v1/completions", content=b"{}", headers=JSON)
    assert reply.status_code == 400
    with raw_connection(server) as raw:
        lines = [f"{name}: {value}" for name, value in declared.items()]
        head = "\r\n".join(["POST /api HTTP/1.1", "Host: localhost", *lines, "", ""])
        raw.sendall(head.encode())
        assert raw.recv(100).split()[1] in (b"400", b"413")

    def endless() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * 1000

    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = server.client.post(path, content=endless(), headers=JSON)
        assert reply.status_code == 413, path
    body = json.dumps({"prompts": ["a" * 20_001]})
    reply = server.client.put("/api", content=body, headers=JSON)
    assert reply.status_code == 413
    assert "20000" in reply.json()["message"]


def test_a_client_that_sends_all_of_a_large_body_sees_why_it_is_refused(
    server: Running, closed: Running
) -> None:
    body = json.dumps({"prompts": ["a" * 5_000_000]}).encode()
    for url, status, word in ((server.url, 413, "20000"), (closed.url, 401, "Bearer KEY")):
        asked = urllib.request.Request(f"{url}/api", body, JSON, method="PUT")
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(asked, timeout=20)
        assert found.value.code == status
        assert word in json.loads(found.value.read())["message"]


BODIES = [
    b"",
    b"{",
    b"[" * 9_000,
    b'{"a":' * 3_000,
    b"\xff\xfe",
    b'"text"',
    b"null",
    b"[]",
    b'{"prompt": "\\ud800"}',
    b'{"prompts": ["\\udfff"]}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "max_tokens": 1e400}',
    b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
    b'{"prompt": "a", "n": 99999999999999999999}',
    b'{"prompt": [[]]}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [true]}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "model": "../../etc/passwd"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"prompts": ["a"], "top_p": NaN}',
    b'{"prompts": ["a"], "length_penalty": -1e308, "beam_width": 2}',
    b'{"prompts": ["a"], "debug_fname": "/tmp/a"}',
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_hostile_bodies_are_bad_requests(server: Running, body: bytes) -> None:
    for method, path in (
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("PUT", "/api"),
    ):
        reply = server.client.request(method, path, content=body, headers=JSON)
        assert reply.status_code in (400, 404), (path, reply.text)
        assert len(reply.text) < 20_000
    assert server.client.get("/health").status_code == 200


BODY = b'{"prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
LOCAL, LENGTH = b"Host: localhost\r\n", b"Content-Length: 32\r\n"
REQUESTS: dict[str, tuple[bytes, set[int]]] = {
    "as it should be": (HEAD + LOCAL + LENGTH + b"\r\n" + BODY, {200}),
    "a foreign host and ours": (HEAD + b"Host: evil.example\r\n" + LOCAL + LENGTH, {400}),
    "ours and a foreign host": (HEAD + LOCAL + b"Host: evil.example\r\n" + LENGTH, {400}),
    "two hosts in a header": (HEAD + b"Host: localhost, evil.example\r\n" + LENGTH, {400}),
    "a host and a tab": (HEAD + b"Host: localhost\tevil.example\r\n" + LENGTH, {400}),
    "a host of a user": (HEAD + b"Host: localhost:80@evil.example\r\n" + LENGTH, {400}),
    "a host with a path": (HEAD + b"Host: localhost/evil.example\r\n" + LENGTH, {400}),
    "a host of Latin-1": (HEAD + b"Host: localh\xf6st\r\n" + LENGTH, {400}),
    "no host": (HEAD + LENGTH, {400}),
    "a whole foreign URL": (
        HEAD.replace(b"/v1", b"http://evil.example/v1") + b"Host: evil.example\r\n" + LENGTH,
        {400, 404, 421},
    ),
    "two lengths": (HEAD + LOCAL + LENGTH + b"Content-Length: 5\r\n", {400}),
    "a length below zero": (HEAD + LOCAL + b"Content-Length: -1\r\n", {400}),
    "a length of a power": (HEAD + LOCAL + b"Content-Length: \xb2\r\n", {400}),
    "a length and chunks": (HEAD + LOCAL + LENGTH + b"Transfer-Encoding: chunked\r\n", {400}),
    "chunks that are none": (HEAD + LOCAL + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400}),
    "a folded header": (HEAD + LOCAL + LENGTH + b"X: a\r\n b\r\n", {200, 400}),
    "a header without a name": (HEAD + LOCAL + LENGTH + b": a\r\n", {400}),
    "a megabyte of headers": (HEAD + LOCAL + (b"X: " + b"a" * 1000 + b"\r\n") * 1000, {400}),
    "a path of a megabyte": (HEAD.replace(b"/v1", b"/" + b"a" * 2**20) + LOCAL, {400}),
    "a path out of the folder": (b"GET /../../../etc/passwd HTTP/1.1\r\n" + LOCAL, {404}),
    "an escaped path": (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + LOCAL, {404}),
    "an escaped zero": (b"GET /page.css%00.html HTTP/1.1\r\n" + LOCAL, {404}),
    "a path of escapes": (b"GET /%1b]0;owned%07 HTTP/1.1\r\n" + LOCAL, {404}),
    "TRACE": (b"TRACE / HTTP/1.1\r\n" + LOCAL, {404, 405}),
    "CONNECT": (b"CONNECT evil.example:80 HTTP/1.1\r\n" + LOCAL, {400, 404, 405}),
    "a websocket": (
        b"GET /v1/models HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + LOCAL,
        {200, 400},
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n", {400}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_forged_request_is_refused_and_the_next_is_answered(server: Running, kind: str) -> None:
    sent, statuses = REQUESTS[kind]
    whole = sent if b"\r\n\r\n" in sent else sent + b"\r\n"
    with raw_connection(server) as connection:
        try:
            connection.sendall(whole)
            with contextlib.suppress(OSError):  # the server has closed it
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(2**16)
        except ConnectionError:  # closed before all was read
            answer = b""
    assert not answer or int(answer.split()[1]) in statuses, answer
    assert b"root:" not in answer
    assert server.client.get("/health").status_code == 200


SLOW = [b"", b"POST", HEAD, HEAD + LOCAL + LENGTH + b"\r\n", HEAD + LOCAL + LENGTH + b"\r\n{"]


def test_clients_that_send_slowly_hold_up_nobody(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        for part in SLOW * 20:
            connection = stack.enter_context(raw_connection(server))
            connection.sendall(part)
        for _ in range(3):
            assert server.post("/v1/completions", **ASK).status_code == 200


def test_clients_that_never_read_hold_up_nobody(server: Running) -> None:
    streamed = json.dumps({"prompt": "a", "max_tokens": 50, "stream": True}).encode()
    length = f"Content-Length: {len(streamed)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # more than the engine runs at a time
            connection = stack.enter_context(raw_connection(server))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.sendall(HEAD + LOCAL + length + streamed)
        assert server.post("/v1/completions", **ASK).status_code == 200


def test_the_page_loads_nothing_from_elsewhere_and_is_framed_by_nobody(server: Running) -> None:
    reply = server.client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/page.js", "/page.css"):
        assert "http" not in server.client.get(path).text.replace("http-equiv", ""), path
    assert server.client.get("/docs").status_code == 404


@pytest.mark.parametrize("wants_text", [False, True])
def test_the_log_has_a_line_for_each_request_and_texts_only_on_request(
    generator: ModelOnRanks, caplog: pytest.LogCaptureFixture, wants_text: bool
) -> None:
    caplog.set_level(logging.INFO, "trainyard.serving.access")
    fields = {"max_tokens": 2, "prompt": SECRET}
    with running(generator, log_prompts=wants_text, key=KEY) as talking:
        talking.client.headers["Authorization"] = f"Bearer {KEY}"
        talking.post("/v1/completions", **fields)
        talking.post("/v1/completions", **fields, stream=True)
        talking.put(prompts=[SECRET], tokens_to_generate=2, no_log=True)
        talking.client.get("/x%1b[31m?key=secret")
    lines = [
        json.loads(record.message) for record in caplog.records if record.name.endswith("access")
    ]
    assert [line["status"] for line in lines] == [200, 200, 200, 404]
    assert [line["path"] for line in lines][:3] == ["/v1/completions"] * 2 + ["/api"]
    assert lines[0]["completion_tokens"] == lines[1]["completion_tokens"] == 2
    assert (SECRET in caplog.text) == wants_text
    assert SECRET not in json.dumps(lines[2]), "no_log"
    assert KEY not in caplog.text
    assert "\x1b" not in caplog.text
