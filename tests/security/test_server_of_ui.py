"""The Prefect server of `make ui`, against other users and foreign pages."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.server.home import UI
from tests.security import servers
from tests.security.attacks import EVIL, Target, open_folder, statuses_for_stranger
from tests.yard.yard import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    with (folder / "log").open("w") as log, servers.ui_server(folder / "yard", log) as target:
        yield target


@pytest.mark.every_case
@pytest.mark.parametrize("check", servers.CHECKS, ids=lambda check: check.__name__)
def test_the_server_of_the_ui(target: Target, check: Callable[[Target], None]) -> None:
    check(target)


def test_the_front_page_leads_to_the_ui(target: Target) -> None:
    assert target.ask("GET", "/", accept="text/html").status == 307
    assert b"<html" in target.ask("GET", "/v2/", accept="text/html").body


def test_no_page_may_frame_its_pages(target: Target) -> None:
    for path in ("/v2/", "/v2/dashboard", "/trainyard/log-in", "/ui-settings"):
        reply = target.ask("GET", path, accept="text/html")
        assert reply.status == 200, path
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"], path


def test_other_users_read_nothing_of_it(target: Target, folder: Path) -> None:
    servers.tells_no_other_user(target, folder)
    assert {"ui.env", "log-in.html"} <= {path.name for path in target.home.iterdir()}


def test_a_websocket_that_cannot_log_in_is_closed_in_one_line(target: Target, folder: Path) -> None:
    servers.closes_websockets_without_a_traceback(target, folder / "log")


def test_a_flow_beside_it_has_a_server_of_its_own_on_the_same_home(target: Target) -> None:
    with servers.own_server(target.home) as own:
        servers.answers_its_owner(own)
        servers.keeps_other_passwords_out(target, own)
    servers.answers_its_owner(target)


# --- a shell on the machine that works ------------------------------------------------------------


def in_its_shell(target: Target, command: str) -> subprocess.Popen[str]:
    """Start what the README says, in a shell that has read the file of `make ui`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    words = f". {target.home / UI}; export PATH={BIN}:$PATH; exec {command}"
    return subprocess.Popen(
        ["sh", "-c", words],
        cwd=ROOT,
        env={**kept, "YARD": str(target.home.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(target: Target, command: str) -> str:
    """The same, to its end."""
    with in_its_shell(target, command) as process:
        output, _ = process.communicate(timeout=servers.SECONDS)
    assert process.returncode == 0, output
    return output


@contextmanager
def worker(target: Target) -> Iterator[None]:
    """A worker of pool `local`, which looks for runs."""
    with in_its_shell(target, "prefect worker start --pool local") as process:
        try:
            deadline = time.monotonic() + servers.SECONDS
            workers = "/api/work_pools/local/workers/filter"
            while b"ONLINE" not in target.as_owner("POST", workers, {}).body.upper():
                assert time.monotonic() < deadline, process.poll()
                time.sleep(0.3)
            yield
        finally:
            process.terminate()


def run_of(file: Path) -> dict[str, object]:
    """A run whose command makes a file."""
    return {"job_variables": {"command": f"touch {file}"}, "state": {"type": "SCHEDULED"}}


def test_no_stranger_makes_a_worker_run_a_command(target: Target, tmp_path: Path) -> None:
    assert "deployment pretrain-gpt/local" in done(target, "make register")
    there = target.as_owner("GET", "/api/deployments/name/pretrain-gpt/local")
    path = f"/api/deployments/{json.loads(there.body)['id']}/create_flow_run"
    with worker(target):
        mine, page, nobody, other = (tmp_path / name for name in ("mine", "page", "nobody", "uid"))
        assert target.ask("POST", path, run_of(nobody)).status == 401
        evil = {"origin": f"http://{EVIL}", "content_type": "text/plain"}
        assert target.ask("POST", path, run_of(page), **evil).status == 403
        assert target.as_owner("POST", path, run_of(page), **evil).status == 403
        if os.geteuid() == 0:
            assert statuses_for_stranger(target, [(path, run_of(other))]) == [401]
        # The same with the password is what a worker is for; it comes after all of these.
        assert target.as_owner("POST", path, run_of(mine)).status == 201
        deadline = time.monotonic() + servers.SECONDS
        while not mine.exists():
            assert time.monotonic() < deadline
            time.sleep(0.3)
    assert [one.name for one in (mine, page, nobody, other) if one.exists()] == ["mine"]


def test_the_commands_of_the_readme_find_the_password(target: Target) -> None:
    """A deployment, as the test before has registered them."""
    assert "0 written" in done(target, "make register")
    output = done(target, "prefect deployment run pretrain-gpt/local --param recipe=none.toml")
    assert "Created flow run" in output
    assert "auth" in done(target, "python -m flows.doctor --yard local --only auth")


def test_the_log_in_file_opens_the_pages_and_a_wrong_link_does_not(target: Target) -> None:
    page = (target.home / "log-in.html").read_text()
    (link,) = re.findall(r'<a href="(.*?)">', page)
    path, _, word = link.removeprefix(target.url).partition("#")
    reply = target.ask("GET", path)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert word not in reply.body.decode()
    script = re.findall("<script>(.*?)</script>", reply.body.decode(), re.DOTALL)[0]
    assert in_browser(script, target.url, word) == f"{word} /"
    wrong = base64.b64encode(b"trainyard:wrong").decode()
    assert in_browser(script, target.url, wrong) == "nothing /"


def in_browser(script: str, server: str, fragment: str) -> str:
    """What a script of a page of the server has kept, and where it leads."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    stage = f"""
      let kept = "nothing";
      const localStorage = {{setItem: (name, value) => {{
        if (name === "prefect-password") kept = value; }}}};
      const location = {{hash: {json.dumps("#" + fragment)},
                         replace: to => console.log(kept, to)}};
      const ask = globalThis.fetch;
      (function (fetch) {{ {script} }})((path, how) => ask({json.dumps(server)} + path, how));
    """
    run = subprocess.run([node, "-e", stage], capture_output=True, text=True, timeout=60)
    return run.stdout.strip() or run.stderr
