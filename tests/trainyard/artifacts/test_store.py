"""Laws that every kind of store obeys."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from trainyard.artifacts import conditional, inputs, store
from trainyard.artifacts.digest import digest_bytes
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError


def test_what_is_written_is_read_back_with_its_digest(store_url: str) -> None:
    url = store.join(store_url, "a", "b.bin")
    record = store.write_bytes(url, b"hello" * 1000)
    assert store.read_bytes(url) == b"hello" * 1000
    assert (record.path, record.size_bytes) == ("b.bin", 5000)
    assert record.digest == digest_bytes(b"hello" * 1000)
    assert store.info(url).size_bytes == 5000


@pytest.mark.few_cases(1)
def test_a_file_larger_than_a_part_of_an_upload_is_whole(store_url: str) -> None:
    url = store.join(store_url, "large.bin")
    piece = bytes(range(256)) * 4096
    with store.open_output(url) as file:
        for _ in range(36):  # 36 MiB: more than two upload parts
            file.write(piece)
    assert store.info(url).size_bytes == 36 * len(piece)
    with store.open_input(url) as found:
        found.seek(20 * len(piece) + 7)
        assert found.read(5) == piece[7:12]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Under the name of a file, in a folder of somebody else's."""
    os.mkfifo(tmp_path / "config.json")
    url = str(tmp_path / "config.json")
    for read in (store.open_input, store.read_bytes, store.read_json):
        with pytest.raises(ArtifactError, match="not a file but a pipe"):
            read(url)
    with pytest.raises(InfrastructureError):
        store.read_range(url, 0, 10)


def test_a_file_appears_only_when_it_is_whole(store_url: str) -> None:
    url = store.join(store_url, "half.bin")
    file = store.open_output(url)
    file.write(b"half")
    assert not store.exists(url)
    file.__exit__(RuntimeError, RuntimeError("the writer failed"), None)
    assert not store.exists(url)
    assert store.list_files(store_url) == {}


def test_listing_is_relative_recursive_and_sorted(store_url: str) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.txt"):
        store.write_bytes(store.join(store_url, name), name.encode())
    assert list(store.list_files(store_url).items()) == [
        ("a.txt", 5),
        ("b/1.txt", 7),
        ("b/2.txt", 7),
    ]


def test_a_pattern_a_folder_and_a_file_expand(store_url: str) -> None:
    for name in ("x1.jsonl", "x2.jsonl", "y.txt", ".hidden"):
        store.write_bytes(store.join(store_url, name), b"1")
    assert [store.basename(u) for u in store.expand(store.join(store_url, "x*.jsonl"))] == [
        "x1.jsonl",
        "x2.jsonl",
    ]
    assert [store.basename(u) for u in store.expand(store_url)] == ["x1.jsonl", "x2.jsonl", "y.txt"]
    assert store.expand(store.join(store_url, "y.txt")) == [store.join(store_url, "y.txt")]


def test_a_missing_file_is_named(store_url: str) -> None:
    url = store.join(store_url, "nothing.json")
    with pytest.raises(ArtifactError, match=r"nothing\.json: there is no such"):
        store.read_bytes(url)
    with pytest.raises(ArtifactError, match="no file matches"):
        store.expand(store.join(store_url, "*.json"))


def test_create_only_happens_once(store_url: str) -> None:
    url = store.join(store_url, "manifest.json")
    assert conditional.put_if_absent(url, b"first") is not None
    assert conditional.put_if_absent(url, b"second") is None
    assert store.read_bytes(url) == b"first"


def test_replacing_needs_the_version_that_was_read(store_url: str) -> None:
    url = store.join(store_url, "manifest.json")
    first = conditional.put_if_absent(url, b"first")
    assert first is not None
    second = conditional.replace_if_match(url, b"second", first)
    assert second is not None
    assert conditional.replace_if_match(url, b"third", first) is None
    assert conditional.read_version(url) == (b"second", second)


def test_replacing_what_is_not_there_fails(store_url: str) -> None:
    assert conditional.replace_if_match(store.join(store_url, "no"), b"x", '"0"') is None


def test_a_repeated_create_of_our_own_bytes_counts_as_won_on_s3(s3_url: str) -> None:
    # The answer to the first attempt may be lost; the retry must not think it lost a race.
    url = store.join(s3_url, "claim.json")
    assert conditional.put_if_absent(url, b"run 1") is not None
    assert conditional.put_if_absent(url, b"run 1") is not None


def test_an_honest_store_passes_the_probe_and_is_left_clean(store_url: str) -> None:
    conditional.require_conditions(store_url)
    assert store.list_files(store_url) == {}


def test_a_store_that_ignores_conditions_is_refused(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainyard.artifacts.backends.s3 import S3Backend

    conditioned = S3Backend.call

    def ignoring(self: S3Backend, method: str, **arguments: object) -> object:
        arguments.pop("IfNoneMatch", None)
        arguments.pop("IfMatch", None)
        return conditioned(self, method, **arguments)

    monkeypatch.setattr(S3Backend, "call", ignoring)
    with pytest.raises(ConfigError, match="ignores conditional writes"):
        conditional.require_conditions(store.join(s3_url, "elsewhere"))


def test_outputs_on_a_kind_of_store_without_conditions_are_refused() -> None:
    with pytest.raises(ConfigError, match="conditional writes"):
        conditional.put_if_absent("memory://a/manifest.json", b"1")


def test_an_unknown_kind_of_storage_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="not a storage protocol"):
        store.read_bytes("nonsense://a/b")


def test_fetch_gives_a_local_copy(store_url: str, tmp_path: Path) -> None:
    url = store.join(store_url, "data.bin")
    store.write_bytes(url, b"0123")
    assert inputs.fetch(url, tmp_path / "copies").read_bytes() == b"0123"


def test_temporary_files_of_dead_and_of_living_processes_are_distinguished(tmp_path: Path) -> None:
    with store.open_output(str(tmp_path / "living.bin")) as file:
        file.write(b"1")
        (name,) = [path.name for path in tmp_path.iterdir()]
        assert not store.is_abandoned(name)
    script = (
        "import os, sys; from trainyard.artifacts import store; "
        "f = store.open_output(sys.argv[1]); f.write(b'1'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "dead.bin")], check=False)
    (dead,) = [path.name for path in tmp_path.iterdir() if path.name.endswith("dead.bin")]
    assert store.is_abandoned(dead)


@pytest.mark.parametrize("size_bytes", [6000, 3 << 20, 9 << 20])
def test_a_full_disk_is_an_error_and_leaves_no_file(size_bytes: int, tmp_path: Path) -> None:
    """In a buffer still, at once, past the page cache: the system takes 5000 bytes of a file."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = store.open_output(str(tmp_path / "a.bin"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most))
    try:
        with pytest.raises(InfrastructureError, match=r"a\.bin: .*File too large"), file:
            file.append_filled(size_bytes, lambda memory: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_moves_whole(store_url: str) -> None:
    for name in ("a.bin", "sub/b.bin", "manifest.json"):
        store.write_bytes(store.join(store_url, "from", name), name.encode())
    store.move_tree(store.join(store_url, "from"), store.join(store_url, "there", "to"))
    assert list(store.list_files(store_url)) == [
        "there/to/a.bin",
        "there/to/manifest.json",
        "there/to/sub/b.bin",
    ]


@pytest.mark.usefixtures("s3_url")
def test_a_bucket_that_is_missing_or_not_named_is_an_error() -> None:
    for look in (store.list_files, store.list_folder, store.info, store.read_bytes, store.expand):
        with pytest.raises(ConfigError, match=r"s3://no-such-bucket-here.*the bucket does not"):
            look("s3://no-such-bucket-here/a/b")
        with pytest.raises(
            ConfigError, match="s3:///a does not name a bucket; write s3://BUCKET/KEY"
        ):
            look("s3:///a")


class RefusesNames(BaseHTTPRequestHandler):
    """A store that refuses the name of every bucket; its answer to HEAD has no body."""

    def do_GET(self) -> None:
        body = b"<Error><Code>InvalidBucketName</Code><Message>No.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.mark.usefixtures("s3_url")
def test_a_refused_bucket_name_is_an_error_with_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = "refuses this name of a bucket; a name has 3 to 63 lower-case"
    with pytest.raises(ConfigError, match=rf"^s3://two words: the store {rule}"):
        store.list_folder("s3://two words/yard")
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusesNames) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for look in (store.exists, store.list_folder):
            with pytest.raises(ConfigError, match=rf"^s3://My_Bucket: the store {rule}"):
                look("s3://My_Bucket/yard")
        server.shutdown()


def test_subfolders_are_those_directly_in_a_folder(store_url: str) -> None:
    for name in ("a/b/c.bin", "a/d.bin", "a/e/f/g.bin", "h/i.bin"):
        store.write_bytes(store.join(store_url, name), b"x")
    for name, found in {"": ["a", "h"], "a": ["b", "e"], "a/b": [], "none": []}.items():
        url = store.join(store_url, name) if name else store_url
        assert store.backend(url).list_subfolders(url) == found
