"""Links that lead nowhere, and what is no file: told as such, whoever asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.artifacts import inputs, store
from trainyard.artifacts.inputs import resolve
from trainyard.errors import ArtifactError, ConfigError

ASK: list[Callable[[str], object]] = [
    store.read_bytes,
    store.open_input,
    store.info,
    store.expand,
    lambda url: store.read_range(url, 0, 1),
    lambda url: inputs.fetch(url, Path()),
    lambda url: resolve("input", [url]),
]


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("a.bin", "a link to a.bin, which leads back to it"),
        ("b.bin", "a link to b.bin, which leads back to it"),
        ("nowhere", "a link to nowhere, which does not exist; fix or remove it"),
    ],
)
def test_a_broken_link_is_named(
    tmp_path: Path, ask: Callable[[str], object], target: str, words: str
) -> None:
    (tmp_path / "a.bin").symlink_to(target)
    (tmp_path / "b.bin").symlink_to("a.bin")
    with pytest.raises(ArtifactError, match=f"{tmp_path}/a.bin: {words}"):
        ask(str(tmp_path / "a.bin"))


@pytest.mark.parametrize("target", ["a", "nowhere"])
def test_a_folder_that_a_broken_link_should_lead_to_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "a").symlink_to(target)
    with pytest.raises(ArtifactError, match=f"c.bin: {tmp_path}/a is a link to {target}, which"):
        store.read_bytes(str(tmp_path / "a" / "c.bin"))


@pytest.mark.parametrize("url", ["{}", "{}/*.jsonl"])
@pytest.mark.parametrize("target", ["b.jsonl", "nowhere"])
def test_no_file_of_an_input_is_left_out_in_silence(tmp_path: Path, url: str, target: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    (tmp_path / "b.jsonl").symlink_to(target)
    with pytest.raises(ArtifactError, match=r"b\.jsonl: a link to"):
        store.expand(url.format(tmp_path))
    assert store.list_files(str(tmp_path)) == store.list_folder(str(tmp_path)) == {"a.jsonl": 2}
    assert resolve("input", [str(tmp_path / "a.jsonl")]).files == (str(tmp_path / "a.jsonl"),)


@pytest.mark.parametrize("ask", [ask for ask in ASK if ask is not ASK[4]])
def test_a_pipe_is_no_file(tmp_path: Path, ask: Callable[[str], object]) -> None:
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(ArtifactError, match=r"a\.bin: not a file but a pipe or a device; copy it"):
        ask(str(tmp_path / "a.bin"))


TOO_LONG = "the file system takes no name as long; choose a shorter one"


@pytest.mark.parametrize("ask", ASK)
def test_a_name_that_is_too_long_is_not_there(tmp_path: Path, ask: Callable[[str], object]) -> None:
    with pytest.raises(ArtifactError, match=TOO_LONG):
        ask(str(tmp_path / ("x" * 300)))


def test_a_long_name_is_read_and_no_longer_one_is_written(tmp_path: Path) -> None:
    """The manifest beside it would have a name that is too long, so there is none."""
    (tmp_path / ("x" * 250)).write_bytes(b"1")
    assert resolve("input", [str(tmp_path / ("x" * 250))]).files
    with pytest.raises(ConfigError, match=TOO_LONG):
        store.write_bytes(str(tmp_path / ("x" * 300)), b"1")


def test_a_folder_that_may_not_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def refused(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match=r"access refused .*closed.*check the permissions"):
        store.expand(str(tmp_path))
