"""/openapi.json describes the interface, and no request that it allows, or nearly, breaks the
server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainyard.serving.running import Running, running
from trainyard.inference.load import ModelOnRanks

PAGE = Path(__file__).parents[3] / "docs/serving.md"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
CHECKS += ",response_schema_conformance"


def fuzzed(server: Running, tmp_path: Path, *words: str, seconds: float) -> None:
    """Run schemathesis, which fails for the first answer that breaks a check."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run"]
    command += [f"{server.url}/openapi.json", "--checks", CHECKS, "--request-timeout", "60"]
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_minute_of_requests_finds_no_fault(server: Running, tmp_path: Path) -> None:
    words = ("--phases", "fuzzing", "--max-examples", "1000", "--seed", "1", "--max-time", "60")
    fuzzed(server, tmp_path, *words, seconds=180)


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_ten_minutes_of_requests_find_no_fault(generator: ModelOnRanks, tmp_path: Path) -> None:
    with running(generator) as server:
        words = ("--phases", "examples,coverage,fuzzing", "--max-examples", "100000")
        fuzzed(server, tmp_path, *words, "--max-time", "600", seconds=900)


@pytest.mark.slow
def test_every_route_is_described_with_its_errors(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    paths = document["paths"]
    wanted = set(re.findall(r"`[A-Z]+ (/[^ `]+)`", PAGE.read_text()))
    assert paths.keys() == wanted - {"/openapi.json"} | {"/v1/health"}
    for path, method in (("/api", "put"), ("/v1/completions", "post")):
        operation = paths[path][method]
        assert {"200", "400", "401", "413", "429", "503", "504"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]
        kinds = operation["responses"]["200"]["content"].keys()
        streams = {"text/event-stream"} if path.startswith("/v1/") else set()
        assert kinds == {"application/json"} | streams
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = document["components"]["schemas"][name.rpartition("/")[2]]
        assert fields["additionalProperties"] is False
