"""What `make ui` refuses before it serves anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flows import ui
from flows.server.home import settings_of_shell
from tests.web import web_server


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    monkeypatch.setattr("os.umask", lambda mask: 0)  # it is this process's


def test_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert ui.main(["--root", str(tmp_path), "--port", port]) == 2
    assert f"--port {port} cannot be listened on" in capsys.readouterr().err
    assert list((tmp_path / ".prefect").iterdir()) == []


def test_a_yard_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "yard").write_text("a file")
    assert ui.main(["--root", str(tmp_path / "yard"), "--port", "0"]) == 3
    assert "Prefect's database cannot be kept in" in capsys.readouterr().err


def test_readable_password_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "ui.env").touch(0o644)
    assert ui.main(["--root", str(tmp_path), "--port", "0"]) == 2
    assert "ui.env is readable by others" in capsys.readouterr().err


def test_a_root_or_a_folder_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ui.main([])
    assert "--root --home" in capsys.readouterr().err


def test_a_password_that_the_server_could_not_compare_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "admin:gr\u00fcn")
    assert ui.main(["--root", str(tmp_path), "--port", "0"]) == 2
    assert "PREFECT_SERVER_API_AUTH_STRING must be USER:PASSWORD" in capsys.readouterr().err


def test_a_second_time_says_that_it_runs_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / ".prefect"
    (home / "api").mkdir(parents=True, mode=0o700)
    (home / "api" / "health").write_text("true")
    with web_server(home) as server:
        (home / "ui.env").touch(0o600)
        (home / "ui.env").write_text(settings_of_shell(f"{server}/api", "admin:x"))
        assert ui.main(["--root", str(tmp_path), "--port", server.rpartition(":")[2]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"Prefect's pages already run: {server} (log in: file://")
    assert printed.count("\n") == 1
