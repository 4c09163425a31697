"""The worker as a service of systemd."""

from __future__ import annotations

import configparser
import shutil
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


@pytest.mark.parametrize(
    "name",
    [
        "NoNewPrivileges",
        "ProtectControlGroups",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "RestrictSUIDSGID",
    ],
)
def test_it_gives_nothing_more_than_a_worker_needs(
    service: configparser.SectionProxy, name: str
) -> None:
    assert service[name] == "yes"
    assert service["ProtectSystem"] in ("full", "strict")
    assert int(service["UMask"], 8) & 0o007 == 0o007
    assert service["CapabilityBoundingSet"] == ""


@pytest.mark.parametrize(
    "name", ["PrivateTmp", "ProtectProc", "PrivateDevices", "MemoryDenyWriteExecute"]
)
def test_it_takes_nothing_that_flows_need(service: configparser.SectionProxy, name: str) -> None:
    assert name not in service


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_reads_it_without_a_warning(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    text = UNIT.read_text().replace("/shared/trainyard/.venv/bin/python", "/bin/true")
    unit.write_text(text)
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=60", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Unknown" not in done.stderr


@pytest.mark.slow
def test_its_command_is_one_that_prefect_takes(service: configparser.SectionProxy) -> None:
    program, *words = service["ExecStart"].split()
    assert program.endswith("/.venv/bin/python")
    assert words[:2] == ["-m", "flows.worker"]  # takes the options of Prefect's worker
    command = [sys.executable, "-m", "prefect", "worker", "start", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [word for word in words if word.startswith("--") and word not in known] == []
