"""Scripts of deploy/dev, which run as root, against what another user has left for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.security.attacks import NOBODY, open_folder

DEV = Path(__file__).resolve().parents[2] / "deploy/dev"
SCRIPTS = ("engine-up", "engine-down", "store-up", "store-down", "slurm-up", "slurm-down")
PID_FILES = {
    "engine-down": {"dockerd": "dockerd.pid"},
    "store-down": {
        "radosgw": "run/client.rgw.pid",
        "ceph-osd": "run/osd.0.pid",
        "ceph-mon": "run/mon.a.pid",
    },
    "slurm-down": {
        "unshare": "run/node1.pid",
        "slurmctld": "run/slurmctld.pid",
        "munged": "munge/munged.pid",
    },
}
"""Program and file of each process that a script ends."""

pytestmark = pytest.mark.slow

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")

Start = Callable[..., "subprocess.Popen[bytes]"]


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A script on a folder of a test; images of this machine's own engine are out of its reach."""
    folder = Path(arguments[-1])
    environment = {**os.environ, "YARD_ENGINE_DATA": str(folder.with_name("images"))}
    return subprocess.run(
        [DEV / f"{script}.sh", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a sleeping process under a name, as a user, with a text among its variables."""
    running: list[subprocess.Popen[bytes]] = []
    sleep = shutil.which("sleep")
    assert sleep is not None

    def sleeping(name: str, text: str = "", user: int | None = None) -> subprocess.Popen[bytes]:
        program = programs / name
        if not program.exists():
            shutil.copy(sleep, program)
        process = subprocess.Popen([program, "600"], env={"TEXT": text}, user=user)
        running.append(process)
        return process

    with open_folder() as programs:  # another user runs them too
        yield sleeping
        for process in running:
            process.kill()
            process.wait()


def plant(folder: Path, file: str, process: subprocess.Popen[bytes]) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"{process.pid}\n")
    (folder / "slurm.conf").touch()  # else slurm-down.sh finds no cluster there


@only_root
@pytest.mark.parametrize("script", [*SCRIPTS, "slurm-power-off"])
def test_a_folder_of_another_user_is_refused(script: str, tmp_path: Path, start: Start) -> None:
    folder, victim = tmp_path / "yard", start("unshare", f"{tmp_path}/yard/")
    for files in PID_FILES.values():
        for file in files.values():
            plant(folder, file, victim)
    os.chown(folder, NOBODY, NOBODY)
    done = run(script, *(["node1"] if script == "slurm-power-off" else []), folder)
    assert done.returncode == 1
    assert f"{folder} belongs to user {NOBODY}" in done.stderr
    assert victim.poll() is None
    assert folder.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_link_in_place_of_the_folder_is_refused(script: str, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "yard").symlink_to(tmp_path / "precious")
    done = run(script, tmp_path / "yard")
    assert done.returncode == 1
    assert "is a symbolic link" in done.stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(
    script: str, mode: int, tmp_path: Path
) -> None:
    (tmp_path / "yard").mkdir()
    (tmp_path / "yard").chmod(mode)
    done = run(script, tmp_path / "yard")
    assert done.returncode == 1
    assert "others may write to it" in done.stderr


@only_root
def test_a_folder_within_one_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "yard").mkdir(parents=True)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    done = run("store-down", tmp_path / "theirs" / "yard")
    assert done.returncode == 1
    assert f"{tmp_path / 'theirs'}, where" in done.stderr


@only_root
@pytest.mark.parametrize("script", PID_FILES)
def test_a_process_id_of_another_program_is_left_alone(
    script: str, tmp_path: Path, start: Start
) -> None:
    folder = tmp_path / "yard"
    text = f"{folder}/"
    for program, file in PID_FILES[script].items():
        strangers = {
            "another program of ours": start("bystander", text),
            "that program for another folder": start(program, f"{folder}2/"),
            "that program of another user": start(program, text, user=NOBODY),
        }
        for what, process in strangers.items():
            plant(folder, file, process)
            assert run(script, folder).returncode == 0, what
            assert process.poll() is None, (program, what)


@only_root
@pytest.mark.parametrize("script", PID_FILES)
def test_a_process_that_was_started_is_ended(script: str, tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "yard"
    started = [start(program, f"{folder}/") for program in PID_FILES[script]]
    for process, file in zip(started, PID_FILES[script].values(), strict=True):
        plant(folder, file, process)
    done = run(script, folder)
    assert done.returncode == 0, done.stderr
    assert all(process.wait(10) < 0 for process in started)


def shell(command: str, user: int | None = None) -> str:
    """What a command prints that uses the functions of folders.sh."""
    functions = (DEV / "folders.sh").read_text()  # the file may be in a folder of root alone
    return subprocess.run(
        ["bash", "-euc", f"{functions}\n{command}"],
        env={"PATH": os.environ["PATH"], "HOME": "/home/me"},
        cwd="/",
        user=user,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_new_folder_is_ours_alone_whatever_the_umask(tmp_path: Path) -> None:
    shell(f'umask 000; own_folder "{tmp_path}/made/yard"')
    assert (tmp_path / "made/yard").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755


@only_root
def test_default_folders_are_where_other_users_cannot_write() -> None:
    assert shell("default_folder yard-engine") == "/run/yard-engine"
    assert shell("default_folder yard-store /var/lib") == "/var/lib/yard-store"
    assert shell("default_folder yard-engine", NOBODY) == "/home/me/.cache/yard-engine"


@pytest.mark.parametrize("path", sorted(DEV.glob("*.sh")), ids=lambda path: path.name)
def test_no_script_uses_a_fixed_name_in_the_temporary_folder(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if re.search(r"/tmp\b|\$\{?TMPDIR", line)] == []
