"""`make env`: secrets are made once, kept for ever, and seen by their owner alone."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import env
from trainyard.version import VERSION

SECRETS = ("POSTGRES_PASSWORD", "YARD_S3_SECRET", "PREFECT_AUTH")


def test_the_first_run_makes_what_compose_needs(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text(f"YARD_HOME={tmp_path / 'yard'}\n")
    command = [sys.executable, env.__file__, "--file", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = env.read(path)
    assert values["TRAINYARD_VERSION"] == VERSION
    assert values["YARD_HOME"] == str(tmp_path / "yard")
    assert (tmp_path / "yard").is_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [name for name in SECRETS if values[name] in output]
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "yard"]


def test_the_yard_is_not_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert env.owner() == "10001:10001"
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("os.getgid", lambda: 99)
    assert env.owner() == "1234:99"


def test_compose_has_a_folder_of_its_own_that_git_ignores() -> None:
    home = Path(env.settled({})["YARD_HOME"])
    assert home != env.ROOT / "yard"
    assert f"/{home.relative_to(env.ROOT)}/" in (env.ROOT / ".gitignore").read_text().splitlines()


def test_an_owner_is_changed_only_of_an_empty_folder_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[tuple[Path, int, int]] = []
    monkeypatch.setattr("os.getuid", lambda: 0)
    monkeypatch.setattr("os.chown", lambda *given: changed.append(given))
    here = tmp_path.stat().st_uid
    values = {"YARD_HOME": str(tmp_path / "made"), "YARD_USER": "54321:54321"}
    assert env.make_home(values) == f"{tmp_path}/made belongs to 54321:54321 now (YARD_USER), " + (
        f"before to {here}"
    )
    assert changed == [(tmp_path / "made", 54321, 54321)]
    (tmp_path / "made" / "quickstart").mkdir()
    assert f"belongs to user {here}, and containers write as YARD_USER=54321" in env.make_home(
        values
    )
    assert env.make_home({**values, "YARD_USER": f"{here}:0"}) == ""
    assert len(changed) == 1


def test_secrets_differ_and_need_no_escape() -> None:
    values = env.settled({})
    secrets = [values[name].removeprefix("admin:") for name in SECRETS]
    assert len(set(secrets)) == len(SECRETS)
    assert all(len(one) == 40 and one.isalnum() for one in secrets)
    assert env.settled({})["POSTGRES_PASSWORD"] != values["POSTGRES_PASSWORD"]


def test_a_second_run_keeps_every_value_but_the_version() -> None:
    before = env.settled({}) | {"TRAINYARD_VERSION": "0.0.1", "YARD_SHM": "64g", "YARD_BUCKET": "b"}
    after = env.settled(before)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"TRAINYARD_VERSION"}
    assert after.keys() == before.keys()


def test_a_relative_home_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="absolute path"):
        env.make_home(env.settled({"YARD_HOME": "yard"}))
