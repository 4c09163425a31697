"""Names, files and connections that would reach beyond a yard."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy import env
from flows.backends.run_folder import make_run_folder
from flows.browse.command import bound
from flows.browse.root import Root
from flows.browse.server import MOST_CONNECTIONS
from flows.recipes.recipe import parse_recipe
from tests.security.attacks import NOBODY
from trainyard.errors import ConfigError

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")

# --- names of recipes -------------------------------------------------------------------------

OURS = ["...toml", "..toml", ".toml", ".runs.toml", ".prefect.yaml", ".digests.json", "..runs.toml"]


@pytest.mark.parametrize("folder", ["", "recipes/", "/etc/", "s3://bucket/", "https://h/"])
@pytest.mark.parametrize("name", OURS)
def test_a_recipe_is_not_named_like_a_folder_of_ours(folder: str, name: str) -> None:
    with pytest.raises(ConfigError, match="begins with a dot"):
        parse_recipe("{}", folder + name, "yard")


@pytest.mark.parametrize("name", ["a.toml", "a..toml", "a.b.toml", "-a.toml", "\u00e9.toml"])
def test_every_other_recipe_lies_in_the_yard(name: str) -> None:
    root = parse_recipe("", name, "/yard").root
    assert os.path.normpath(root) == f"/yard/{Path(name).stem}"


# --- run folders ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("umask", "mode"),
    [
        (0o022, 0o700),
        (0o027, 0o700),
        (0o077, 0o700),
        (0o002, 0o770),
        (0o007, 0o770),
        (0o000, 0o777),
    ],
)
def test_a_run_folder_is_its_owners_alone_unless_others_may_write_and_what_is_above_it_as_usual(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        make_run_folder(tmp_path / "runs" / "merge" / "7c1f-1")
        make_run_folder(tmp_path / "runs" / "merge" / "7c1f-1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "merge").stat().st_mode) == 0o777 & ~umask
    assert stat.S_IMODE((tmp_path / "runs" / "merge" / "7c1f-1").stat().st_mode) == mode


# --- make env ---------------------------------------------------------------------------------


def make_env(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, env.__file__, "--file", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A file as a first run writes it."""
    path = tmp_path / ".env"
    path.write_text(f"YARD_HOME={tmp_path / 'yard'}\n")
    path.chmod(0o600)
    assert make_env(path).returncode == 0
    return path


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666, 0o604])
def test_settings_that_others_could_read_are_closed(settings: Path, mode: int) -> None:
    settings.chmod(mode)
    before = settings.read_text()
    assert make_env(settings).returncode == 0
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert settings.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [".env", ".env.tmp"])
def test_make_env_follows_no_link(settings: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("POSTGRES_PASSWORD=known\n")
    victim.chmod(0o644)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(victim)
    done = make_env(settings)
    assert victim.read_text() == "POSTGRES_PASSWORD=known\n"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    if name == ".env":
        assert done.returncode == 1
        assert f"{settings} is a symbolic link" in done.stderr
    else:
        assert done.returncode == 0
        assert not settings.is_symlink()


@pytest.mark.slow
@only_root
def test_settings_of_another_user_are_refused(settings: Path) -> None:
    os.chown(settings, NOBODY, NOBODY)
    done = make_env(settings)
    assert done.returncode == 1
    assert f"{settings} belongs to user {NOBODY}" in done.stderr


# --- browse -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_browse_opens_no_more_threads_than_it_has(tmp_path: Path) -> None:
    (tmp_path / "card.html").write_text("card")
    with bound(Root(str(tmp_path)), "127.0.0.1", 0) as server, ExitStack() as open_ones:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        before = threading.active_count()
        many = [
            open_ones.enter_context(
                socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
            )
            for _ in range(MOST_CONNECTIONS + 3)
        ]
        assert [one.recv(1) for one in many[MOST_CONNECTIONS:]] == [b""] * 3
        assert threading.active_count() <= before + MOST_CONNECTIONS
        many[0].close()
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as one:
            one.sendall(b"GET /card.html HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 200 OK" in one.recv(100)
        server.shutdown()
        thread.join()
