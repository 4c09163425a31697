"""The worker as a service of systemd, and what docs/slurm.md prints of it."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from flows.doctor.machine import FILES_WARNED

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy/systemd/trainyard-worker@.service"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    assert unit["Install"]["WantedBy"]
    return unit["Service"]


def test_worker_restarts_and_its_stop_spares_the_flows(service: configparser.SectionProxy) -> None:
    assert service["Restart"] == "always"
    assert (service["KillMode"], service["KillSignal"]) == ("process", "SIGKILL")
    assert int(service["LimitNOFILE"]) >= FILES_WARNED


def test_docs_print_it_as_it_is(service: configparser.SectionProxy) -> None:
    text = UNIT.read_text()
    printed = text[text.index("[Service]") : text.index("\n[Install]")]
    assert f"```ini\n{printed}```" in (ROOT / "docs/slurm.md").read_text()


@pytest.mark.slow
def test_its_command_is_one_that_prefect_takes(service: configparser.SectionProxy) -> None:
    program, *words = service["ExecStart"].split()
    assert program.endswith("/.venv/bin/prefect")
    command = [sys.executable, "-m", "prefect", *words[:2], "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert words[:2] == ["worker", "start"]
    assert [word for word in words if word.startswith("--") and word not in known] == []
