"""Figures are told and kept one by one."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.figures import STATE, Record, gpu_state, query_gpus


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for nvidia-smi: prints what is written into its file."""
    program, answer = tmp_path / "bin" / "nvidia-smi", tmp_path / "answer"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return answer


def test_a_record_holds_what_was_measured_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "figures.json"
    record = Record(path)
    assert json.loads(path.read_text())["figures"] == []
    for number, joules in ((1, 0.5), (2, math.nan)):
        record.add("ours gpt-1.3b", f"{number} tok/s", {"rate": number, "joules": joules})
        found = json.loads(path.read_text())
        assert len(found["figures"]) == number
    assert found["figures"][1] == {"of": "ours gpt-1.3b", "rate": 2, "joules": None}
    assert found["versions"]["torch"] == version("torch")
    said = capsys.readouterr()
    assert said.err == "ours gpt-1.3b: 1 tok/s\nours gpt-1.3b: 2 tok/s\n"
    assert said.out == ""


def test_gpus_are_asked_with_units(tool: Path) -> None:
    tool.write_text("NVIDIA H200, 700.00 W\nNVIDIA H200, 700.00 W\n")
    assert (
        query_gpus(("name", "power.limit"))
        == [{"name": "NVIDIA H200", "power.limit": "700.00 W"}] * 2
    )


def test_the_state_of_a_gpu_has_only_numbers(tool: Path) -> None:
    tool.write_text("1455 MHz, 3201 MHz, 692.31 W, [N/A]\n")
    assert gpu_state() == dict(zip(STATE, (1455.0, 3201.0, 692.31), strict=False))
