"""What the command line of a flow prints around its run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli import flow_commands
from flows.cli.flow_commands import flow_main
from tests.flows.recipes.test_recipe import TINY

LOSSES = {"validation_loss_first": 8.361, "validation_loss": 5.4}


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, Any], *arguments: str
) -> int:
    """Run the recipe with a stand-in for its flow."""
    (folder / "tiny.toml").write_text(TINY)
    stages = [{"stage": "plan", "metrics": {}}, {"stage": "pretrain", "metrics": metrics}]
    result = {"card": f"{folder}/yard/tiny/card.html", "stages": stages}
    monkeypatch.setattr(flow_commands, "run_program", lambda *_, **given: (0, result))
    return flow_main("pretrain_gpt", [str(folder / "tiny.toml"), *arguments])


def test_a_run_ends_with_its_losses_and_a_link_to_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, monkeypatch, LOSSES, "--root", f"{tmp_path}/yard") == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == "validation loss: from 8.36 to 5.40 nats per token"
    assert shown.out == f"file://{tmp_path}/yard/tiny/card.html\n"
    assert run(tmp_path, monkeypatch, {}, "--root", f"{tmp_path}/yard") == 0
    assert "validation" not in capsys.readouterr().err


def test_the_first_line_names_run_folders_elsewhere(
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, monkeypatch, LOSSES, "--root", s3_url) == 0
    runs = f"everything goes to {s3_url}/tiny, options and logs of its stages to {tmp_path}/yard"
    assert f"{runs}/tiny/.runs\n" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, LOSSES, "--root", f"{tmp_path}/yard") == 0
    assert "options and logs" not in capsys.readouterr().err


def test_force_reaches_the_flow_and_a_wrong_name_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = []

    def run_program(*_: Any, **parameters: Any) -> tuple[int, None]:
        given.append(parameters)
        return 3, None

    monkeypatch.setattr(flow_commands, "run_program", run_program)
    (tmp_path / "tiny.toml").write_text(TINY)
    where = [str(tmp_path / "tiny.toml"), "--root", f"{tmp_path}/yard"]
    assert flow_main("pretrain_gpt", [*where, "--force", "pretrain,export"]) == 3
    assert given[0]["force"] == "pretrain,export"
    assert flow_main("pretrain_gpt", [*where, "--force", "pretain"]) == 2
    assert "no stage 'pretain'; did you mean 'pretrain'" in capsys.readouterr().err
    assert len(given) == 1


@pytest.mark.slow
def test_a_flow_sets_prefects_environment_before_prefect_reads_it() -> None:
    """Otherwise Prefect starts a server of its own, without a password."""
    program = "import sys, flows.cli.flow_commands; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
