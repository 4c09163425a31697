"""The command line of the registration, as far as it goes without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.register import command
from flows.register.command import main
from flows.register.report import Report


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_without_a_server_the_error_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--yard", "local"]) == 2
    assert "PREFECT_API_URL is not set" in capsys.readouterr().err


def test_unknown_yard_is_refused_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--yard", "lokal"]) == 2
    assert "did you mean 'local'" in capsys.readouterr().err


GPU = "[resources.pretrain]\ngpus_per_node = 1\n"


@pytest.mark.parametrize(("text", "warns"), [(GPU, True), ("gpu_memory_gib = 24\n" + GPU, False)])
def test_gpus_of_unknown_memory_give_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(command, "_register", lambda plan, given: Report(is_dry=True))
    file = tmp_path / "mysite.toml"
    file.write_text('block = "container"\nimage = "r.io/{stage}:{version}"\n' + text)
    assert main(["--yard", str(file)]) == 0
    stderr = capsys.readouterr().err
    assert ("warning: yard mysite: a training gets GPUs" in stderr) == warns
