"""What browse serves and what it refuses, over real sockets and from both stores."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

import pytest

from flows.browse.command import bound, main
from flows.browse.root import KINDS, Root
from tests.flows.processes import ROOT, is_running, wait_until
from trainyard.artifacts import store
from trainyard.errors import ConfigError

CARD = b"<!doctype html>\n<title>card</title><script>alert(1)</script>\n"
LOCAL = "127.0.0.1"


class Reply:
    """One response, read to its end."""

    def __init__(self, status: int, headers: Message, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def kind(self) -> str:
        return self.headers["Content-Type"]

    @property
    def text(self) -> str:
        return self.body.decode()


Ask = Callable[..., Reply]


@contextmanager
def serving(url: str, *names: str) -> Iterator[int]:
    """A running server of a root; its port."""
    with bound(Root(url), LOCAL, 0, names) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def asking(url: str, *names: str) -> Iterator[Ask]:
    """A running server of a root; requests to it, with a path that is sent as it is written."""
    with serving(url, *names) as port:

        def ask(path: str, method: str = "GET", **headers: str) -> Reply:
            connection = http.client.HTTPConnection(LOCAL, port, timeout=20)
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            reply = Reply(response.status, response.headers, response.read())
            connection.close()
            return reply

        yield ask


@pytest.fixture
def ask(store_url: str) -> Iterator[Ask]:
    """A yard in each kind of store, and a server of it."""
    for name, data in {
        "tiny/card.html": CARD,
        "tiny/a b#1?.txt": b"odd\n",
        "tiny/tokens/corpus.bin": b"\0\1",
        "tiny/tokens/corpus.manifest.json": b"{}",
        "tiny/.runs/merge/0/config.toml": b"x = 1\n",
        "tiny/.flow.claim.json": b"{}",
        ".prefect/profiles.toml": b'key = "secret"\n',
    }.items():
        store.write_bytes(store.join(store_url, name), data)
    with asking(store_url) as ask:
        yield ask


# --- what is shown --------------------------------------------------------------------------------


def test_a_card_is_served_whole_and_runs_no_script(ask: Ask) -> None:
    reply = ask("/tiny/card.html")
    assert (reply.status, reply.kind, reply.body) == (200, "text/html; charset=utf-8", CARD)
    policy = reply.headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"} < set(policy)
    assert {"sandbox allow-downloads", "frame-ancestors 'none'", "form-action 'none'"} < set(policy)
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in reply.headers


def test_head_has_the_same_headers_without_contents(ask: Ask) -> None:
    whole, head = ask("/tiny/card.html"), ask("/tiny/card.html", "HEAD")
    del whole.headers["Date"], head.headers["Date"]
    assert (head.status, head.headers.items(), head.body) == (200, whole.headers.items(), b"")


def test_a_folder_lists_what_lies_in_it_and_its_links_lead_there(ask: Ask) -> None:
    page = ask("/tiny/").text
    for link in ("../", "./.runs/", "./tokens/", "./card.html", "./a%20b%231%3F.txt"):
        assert f'href="{link}"' in page
    assert ".flow.claim.json" not in page
    assert ask("/tiny/a%20b%231%3F.txt").body == b"odd\n"
    assert ask("/tiny/.runs/merge/0/config.toml").body == b"x = 1\n"
    top = ask("/").text
    assert 'href="./tiny/"' in top
    assert ".prefect" not in top
    assert "../" not in top


def test_a_file_of_another_kind_is_listed_and_not_served(ask: Ask) -> None:
    page = ask("/tiny/tokens/").text
    assert "corpus.bin" in page
    assert 'href="./corpus.bin"' not in page
    reply = ask("/tiny/tokens/corpus.bin")
    assert reply.status == 403
    assert "corpus.bin: files of this kind are not shown, only .html, .json," in reply.text


def test_a_folder_without_a_slash_leads_to_the_one_with_it(ask: Ask) -> None:
    reply = ask("/tiny/tokens")
    assert (reply.status, reply.headers["Location"]) == (302, "./tokens/")
    assert ask("/").status == 200


def test_missing_names_give_404(ask: Ask) -> None:
    for path in ("/tiny/none.html", "/none/", "/none", "/tiny/card.html/", "/favicon.ico"):
        assert ask(path).status == 404, path


@pytest.mark.parametrize("ending", sorted(KINDS))
def test_each_kind_has_its_type(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a{ending.upper()}").write_bytes(b"1")
    with asking(str(tmp_path)) as ask:
        reply = ask(f"/a{ending.upper()}")
        assert reply.kind == KINDS[ending]
        embedded = reply.headers["Cross-Origin-Resource-Policy"] == "cross-origin"
        assert embedded == (ending in (".png", ".svg"))  # in Prefect's pages


def test_a_file_of_many_blocks_is_whole(store_url: str) -> None:
    data = bytes(range(256)) * 40_000  # 10 MB
    store.write_bytes(store.join(store_url, "log.txt"), data)
    with asking(store_url) as ask:
        assert ask("/log.txt").body == data


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    (tmp_path / "<b>&.txt").write_text("x")
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("no name of a URL")
    with asking(str(tmp_path)) as ask:
        page = ask("/").text
        assert "<b>" not in page
        assert "&lt;b&gt;&amp;.txt" in page
        assert "xff" not in page
        assert ask("/%3Cb%3E%26.txt").body == b"x"
        assert ask("/%FF.txt").status == 400


# --- what is not ----------------------------------------------------------------------------------


OUTSIDE = (
    "/../outside.txt",
    "/tiny/../../outside.txt",
    "/%2e%2e/outside.txt",
    "/%2e%2e%2foutside.txt",
    "/tiny/..%2f..%2foutside.txt",
    "/..%5coutside.txt",
    "/tiny//card.html",
    "/%2fetc/hosts.txt",
    "/tiny/./card.html",
    "/card%00.html",
    "http://127.0.0.1/tiny/card.html",
    "*",
)
HIDDEN = (
    "/.prefect/profiles.toml",
    "/.prefect/",
    "/tiny/.flow.claim.json",
    "/tiny/.runs/../.prefect/",
)


def test_a_path_outside_the_root_is_refused(ask: Ask, store_url: str) -> None:
    store.write_bytes(store.join(store.parent(store_url), "outside.txt"), b"of somebody else")
    for path in OUTSIDE:
        reply = ask(path)
        assert reply.status in (400, 403), path
        assert "somebody" not in reply.text


def test_hidden_files_stay_hidden(ask: Ask) -> None:
    for path in HIDDEN:
        reply = ask(path)
        assert reply.status in (400, 403), path
        assert "secret" not in reply.text


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Ask]:
    """A folder with links of every kind in it."""
    root = tmp_path / "root"
    (root / "run" / ".git").mkdir(parents=True)
    (root / "run" / "checkpoint").mkdir()
    (root / "run" / "card.html").write_bytes(CARD)
    (root / "run" / "model.bin").write_bytes(b"\0")
    (root / "run" / ".git" / "config.txt").write_text("hidden")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key.txt").write_text("outside")
    for name, target in {
        "latest": "run",
        "file.txt": "../outside/key.txt",
        "folder": "../outside",
        "absolute.txt": str(tmp_path / "outside" / "key.txt"),
        "git.txt": "run/.git/config.txt",
        "model.txt": "run/model.bin",
        "run/checkpoint/loop.txt": "loop.txt",
        "gone.txt": "nowhere.txt",
    }.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe.txt")
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "a.txt").write_text("outside")
    with asking(str(root)) as ask:
        yield ask


def test_a_link_is_followed_inside_and_never_outside(linked: Ask) -> None:
    assert linked("/latest/card.html").body == CARD
    paths = ("file.txt", "folder/key.txt", "folder/", "absolute.txt", "git.txt", "model.txt")
    more = ("run/checkpoint/loop.txt", "gone.txt", "pipe.txt", "..root2/a.txt", "../root2/a.txt")
    for path in (*paths, *more):
        reply = linked(f"/{path}")
        assert reply.status in (400, 403, 404), path
        assert reply.text.count("\n") == 1
        assert "hidden" not in reply.text
    page = linked("/").text
    assert 'href="./latest/"' in page
    for name in ("file.txt", "folder", "absolute", "git.txt", "gone", "pipe"):
        assert name not in page


def test_nothing_can_be_changed(ask: Ask) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
        reply = ask("/tiny/card.html", method)
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD"), method
        assert reply.text == "only GET and HEAD: this server is read-only\n"
    assert ask("/tiny/card.html").body == CARD


def test_a_foreign_host_name_is_refused(ask: Ask) -> None:
    for host in ("evil.example", "evil.example:4201", "127.0.0.1.evil.example", "localhost."):
        reply = ask("/tiny/card.html", Host=host)
        assert reply.status == 421, host
        assert f"start it with --allow-host {host.partition(':')[0]}" in reply.text


def test_an_invalid_host_name_is_refused(ask: Ask) -> None:
    for host in ("", "a b", "127.0.0.1@evil.example", "[::1", "127.0.0.1:x"):
        assert ask("/tiny/card.html", Host=host).status == 400, host


def test_names_that_are_ours_are_answered(tmp_path: Path) -> None:
    with asking(str(tmp_path), "Files.Example.org") as ask:
        names = ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:4201", "files.example.org")
        for host in names:
            assert ask("/", Host=host).status == 200, host


@pytest.mark.parametrize(
    ("sent", "status_line"),
    [
        (b"nonsense\r\n\r\n", b"Bad request syntax ('nonsense')"),
        (b"GET / HTTP/9.9\r\n\r\n", b"Invalid HTTP version (9.9)"),
        (b"GET /.health HTTP/1.1\r\n\r\n", b"HTTP/1.0 400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", b"HTTP/1.0 400"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 414"),
    ],
)
def test_malformed_requests_are_refused(tmp_path: Path, sent: bytes, status_line: bytes) -> None:
    with bound(Root(str(tmp_path)), LOCAL, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        with socket.create_connection((LOCAL, server.server_port), timeout=20) as connection:
            connection.sendall(sent)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        server.shutdown()
    assert received.startswith(status_line)
    assert b"<" not in received


# --- the store, and the program -------------------------------------------------------------------


@pytest.mark.parametrize("url", ["https://example.org/yard", "gs://yard", "/no/such/folder"])
def test_a_root_that_cannot_be_shown_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--root"):
        Root(url)


@pytest.mark.slow
def test_an_unreachable_store_is_reported(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_bytes(f"{s3_url}/a.txt", b"a")
    with asking(s3_url) as ask:
        with monkeypatch.context() as away:
            away.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            reply = ask("/a.txt")
            assert (reply.status, ask("/.health").status) == (503, 200)
            assert "a.txt: stat failed: " in reply.text or "cannot be reached" in reply.text
        assert ask("/a.txt").body == b"a"


@pytest.mark.slow
def test_a_missing_bucket_ends_it_at_once(
    s3_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["--root", "s3://no-such-bucket-here/yard", "--port", "0"]) == 2
    assert "error: s3://no-such-bucket-here" in capsys.readouterr().err
    assert wait_until(lambda: not any("serve_forever" in t.name for t in threading.enumerate()), 5)


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be listened on"):
            bound(Root(str(tmp_path)), LOCAL, port)


@contextmanager
def program(root: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running program, and the line that it prints."""
    command = [sys.executable, "-m", "flows.browse", "--root", str(root), "--port", "0", *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_whatever_it_is_doing(tmp_path: Path, number: int) -> None:
    with (tmp_path / "long.txt").open("wb") as file:
        file.truncate(1 << 30)
    with program(tmp_path) as (process, line):
        port = int(line.rstrip("/\n").rpartition(":")[2])
        assert line == f"{tmp_path} is shown at http://127.0.0.1:{port}/\n"
        with socket.create_connection((LOCAL, port)) as reading:
            reading.sendall(b"GET /long.txt HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert reading.recv(15) == b"HTTP/1.0 200 OK"  # and takes no more of it
            process.send_signal(number)
            assert process.wait(timeout=5) == 0


@pytest.mark.slow
def test_it_ends_with_the_given_process(tmp_path: Path) -> None:
    shell = f'{sys.executable} -m flows.browse --root "{tmp_path}" --port 0 --end-with $$ & '
    command = ["sh", "-c", shell + "echo $!; exec sleep 60"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        printed = sorted(parent.stdout.readline() for _ in range(2))
        pid = int(next(line for line in printed if line.strip().isdecimal()))
        assert is_running(pid)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(pid), 5)
