"""Prefect's folder and the password in it: for their owner alone, whatever lies there already."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from flows.server.ephemeral import EphemeralServer
from flows.server.home import (
    UI,
    kept_password,
    make_home,
    new_password,
    replace,
    settings_of_shell,
)
from tests.security.attacks import NOBODY
from trainyard.errors import ConfigError, InfrastructureError

URL = "http://127.0.0.1:4200/api"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "yard" / ".prefect"
    make_home(home)
    return home


def test_passwords_differ_and_mean_nothing_to_a_shell() -> None:
    drawn = {new_password() for _ in range(50)}
    assert len(drawn) == 50
    assert all(word.replace(":", "").isalnum() and len(word) == 50 for word in drawn)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_home_is_closed_and_the_yard_about_it_as_usual(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_home(tmp_path / "yard" / ".prefect")
        replace(tmp_path / "yard" / ".prefect" / UI, "x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "yard") == 0o777 & ~umask
    assert mode(tmp_path / "yard" / ".prefect") == 0o700
    assert mode(tmp_path / "yard" / ".prefect" / UI) == 0o600


def test_a_home_that_was_open_is_closed(home: Path) -> None:
    home.chmod(0o777)
    make_home(home)
    assert mode(home) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_a_home_of_another_user_is_refused(home: Path) -> None:
    os.chown(home, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        make_home(home)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        EphemeralServer(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
@pytest.mark.parametrize("name", ["prefect.db", "start.lock", "profiles.toml"])
def test_files_of_another_user_in_an_open_home_are_refused(home: Path, name: str) -> None:
    victim = home.parent / "victim"
    victim.write_text("precious")
    (home / name).symlink_to(victim) if name == "start.lock" else (home / name).touch()
    os.chown(home / name, NOBODY, NOBODY, follow_symlinks=False)
    home.chmod(0o777)
    for _ in range(2):  # closed by the first, it is as bad
        with pytest.raises(ConfigError, match=f"{name} belongs to user 65534, .* remove it"):
            make_home(home)
    assert victim.read_text() == "precious"


def test_the_password_is_kept_and_read_by_a_shell(home: Path) -> None:
    word = kept_password(home)
    replace(home / UI, settings_of_shell(URL, word))
    assert kept_password(home) == word
    shown = f'. {home / UI}; echo "$PREFECT_API_URL $PREFECT_API_AUTH_STRING"'
    result = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    assert result.stdout == f"{URL} {word}\n"


@pytest.mark.parametrize("wrong", [0o644, 0o660, 0o604, 0o777])
def test_a_password_that_others_may_know_is_refused(home: Path, wrong: int) -> None:
    replace(home / UI, settings_of_shell(URL, new_password()))
    (home / UI).chmod(wrong)
    with pytest.raises(ConfigError, match="Remove it"):
        kept_password(home)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "export PREFECT_API_AUTH_STRING=",
        "export PREFECT_API_AUTH_STRING=$(id)",
        "export PREFECT_API_AUTH_STRING=a:b; id",
        "# export PREFECT_API_AUTH_STRING=a:b",
    ],
)
def test_an_invalid_password_is_replaced(home: Path, text: str) -> None:
    replace(home / UI, text)
    assert kept_password(home).startswith("trainyard:")


def test_links_are_not_followed(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "of-somebody"
    other.write_text(settings_of_shell(URL, "known:word"))
    other.chmod(0o600)
    (home / UI).symlink_to(other)
    (home / f"{UI}.tmp").symlink_to(other)
    with pytest.raises(ConfigError, match="symbolic links"):
        kept_password(home)
    replace(home / UI, "new")
    assert "known:word" in other.read_text()
    assert not (home / UI).is_symlink()


def test_the_log_of_a_server_is_no_link(home: Path, tmp_path: Path) -> None:
    (tmp_path / "of-somebody").write_text("")
    (home / "server.log").symlink_to(tmp_path / "of-somebody")
    with pytest.raises(InfrastructureError, match="symbolic links"):
        EphemeralServer(home)
    assert (tmp_path / "of-somebody").read_text() == ""
