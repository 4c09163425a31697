"""Files behind http://: the same as local ones where the server allows it, words where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.web import web_server
from trainyard.artifacts import inputs, store
from trainyard.artifacts.backends import http, readahead
from trainyard.artifacts.digest import digest_bytes, digest_document
from trainyard.artifacts.inputs import resolve
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(readahead, "REQUEST_BYTES", 1000)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/a b.txt").write_bytes(DATA)
    (tmp_path / "dir/none.txt").write_bytes(b"")


def test_a_file_is_read_whole_in_ranges_and_by_seeking(tmp_path: Path) -> None:
    with web_server(tmp_path) as root:
        url = f"{root}/dir/a b.txt"
        assert store.read_bytes(url) == DATA
        assert store.info(url).size_bytes == len(DATA)
        assert store.read_range(url, 70, 90) == DATA[70:90]
        assert b"".join(store.read_whole(url)) == DATA
        with store.open_input(url) as file:
            file.seek(-10, 2)
            assert (file.read(), file.seek(5), file.read(4000)) == (DATA[-10:], 5, DATA[5:4005])
        assert inputs.fetch(url, tmp_path / "copies").read_bytes() == DATA
        assert store.read_bytes(f"{root}/dir/none.txt") == b""
        assert store.info(f"{root}/dir/none.txt").size_bytes == 0
        assert not store.exists(f"{root}/dir/b.txt")
        assert not store.exists(f"{root}/dir")
        with pytest.raises(ArtifactError, match="there is no such file"):
            store.read_bytes(f"{root}/dir/b.txt")
        with pytest.raises(ArtifactError, match="ends at byte 10240"):
            store.read_range(url, 10_200, 10_300)
        with pytest.raises(ArtifactError, match="ends at byte 10300"):
            store.read_range(url, 10_300, 10_400)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    with web_server(tmp_path) as root:
        url = f"{root}/dir/a b.txt"
        version = store.info(url).version
        (tmp_path / "dir/a b.txt").write_bytes(DATA[::-1])
        with pytest.raises(ArtifactError, match="changed while it was being read"):
            store.read_range(url, 0, 10, version)


def test_servers_that_know_no_head_will_do(tmp_path: Path) -> None:
    with web_server(tmp_path, heads=False) as root:
        assert b"".join(store.read_whole(f"{root}/dir/a b.txt")) == DATA
        assert store.info(f"{root}/dir/none.txt").size_bytes == 0


def test_servers_without_ranges_serve_small_files_and_refuse_large_ones_in_words(
    tmp_path: Path,
) -> None:
    with web_server(tmp_path, ranges=False) as root:
        url = f"{root}/dir/a b.txt"
        assert store.read_range(url, 0, 10) == DATA[:10]
        with pytest.raises(ArtifactError, match=r"does not serve parts .* download it"):
            store.read_range(url, 10, 20)


def test_servers_without_lengths_are_refused_in_words(tmp_path: Path) -> None:
    with (
        web_server(tmp_path, ranges=False, lengths=False) as root,
        pytest.raises(ArtifactError, match=r"no Content-Length.*download it"),
    ):
        store.info(f"{root}/dir/a b.txt")


@pytest.mark.parametrize(
    ("statuses", "error", "words"),
    [
        ([403], ConfigError, "access refused .*403.* that everyone may read it"),
        ([503] * 3, InfrastructureError, "answers with HTTP status 503"),
        ([451], ArtifactError, "answers with HTTP status 451"),
    ],
)
def test_refusals_are_errors_that_name_the_cause(
    tmp_path: Path, statuses: list[int], error: type[Exception], words: str
) -> None:
    with (
        web_server(tmp_path, faults=list(statuses)) as root,
        pytest.raises(error, match=words),
    ):
        store.read_range(f"{root}/dir/a b.txt", 0, 10)


def test_what_passes_is_tried_again(tmp_path: Path) -> None:
    with web_server(tmp_path, faults=[503, 429]) as root:
        assert store.read_range(f"{root}/dir/a b.txt", 0, 10) == DATA[:10]
    with pytest.raises(InfrastructureError, match="cannot be read"):
        store.read_bytes(f"{root}/dir/a b.txt")


def test_folders_patterns_and_writing_are_refused(tmp_path: Path) -> None:
    with web_server(tmp_path) as root:
        for url in (f"{root}/dir", f"{root}/dir/*.txt"):
            with pytest.raises(ConfigError, match="a web server does not list"):
                store.expand(url)
        with pytest.raises(ArtifactError, match="no file"):
            store.expand(f"{root}/dir/b.txt")
        with pytest.raises(ConfigError, match="use one of those for outputs"):
            store.write_bytes(f"{root}/dir/new", b"1")


@pytest.mark.parametrize("versions", [True, False])
def test_a_digest_is_remembered_where_the_server_tells_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: bool
) -> None:
    local = resolve("input", [str(tmp_path / "dir/a b.txt")]).digest
    with web_server(tmp_path, versions=versions) as root:
        url = f"{root}/dir/a b.txt"
        assert resolve("input", [url]).digest == local
        with monkeypatch.context() as patch:
            patch.setattr("trainyard.artifacts.inputs.read_digest", lambda url: "read again")
            assert resolve("input", [url]).digest == (local if versions else "read again")
        (tmp_path / "dir/a b.txt").write_bytes(DATA[::-1])
        assert resolve("input", [url]).digest != local


@pytest.mark.slow
def test_many_files_of_one_server_have_the_digests_of_their_contents(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(10)]
    for name in names:
        (tmp_path / name).write_text(name)
    with web_server(tmp_path) as root:
        found = resolve("input", [f"{root}/{name}" for name in names])
    assert found.digest == digest_document([digest_bytes(name.encode()) for name in names])
