"""A flow of another version is refused; another build of the same version is a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stages.directly import run_program
from trainyard.version import VERSION

MODEL = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2")
PLAN = (*MODEL, "--seq-length", "32", "--vocab-size", "300")


def test_the_same_version_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_FLOW_VERSION", VERSION)
    run_program("stages.plan", *PLAN, expect=0)


def test_refusal_names_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_FLOW_VERSION", "0.0.9")
    monkeypatch.setenv("TRAINYARD_RUN_DIR", str(tmp_path))
    run_program("stages.plan", *PLAN, "--output-dir", str(tmp_path / "plan"), expect=2)
    message = json.loads((tmp_path / "failure.json").read_text())["message"]
    assert (
        f"this stage runs trainyard {VERSION}, but the flow that started it runs 0.0.9" in message
    )
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("stage", "flow", "warns"),
    [("aaa", "bbb", True), ("aaa", "aaa", False), ("aaa", "", False), ("unknown", "bbb", False)],
)
def test_another_build_of_the_same_version_logs_a_warning_if_both_revisions_are_known(
    monkeypatch: pytest.MonkeyPatch, stage: str, flow: str, warns: bool
) -> None:
    monkeypatch.setenv("TRAINYARD_FLOW_VERSION", VERSION)
    monkeypatch.setenv("TRAINYARD_REVISION", stage)
    monkeypatch.setenv("TRAINYARD_FLOW_REVISION", flow)
    done = run_program("stages.plan", *PLAN, expect=0)
    message = "of revision aaa, but the flow that started it runs bbb"
    assert (message in done.err) == warns
