"""Functions of other packages: what they raise is theirs, not a defect of trainyard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from trainyard.errors import ConfigError, DataError, InfrastructureError
from trainyard.installed import call_installed, load_entry_point


def _raises(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("no weights"), DataError, r"--x y: raised RuntimeError\('no weights'\)"),
        (SystemExit(0), DataError, r"--x y: raised SystemExit\(0\)"),
        (ConnectionError("busy"), InfrastructureError, "--x y: raised ConnectionError"),
        (RuntimeError("CUDA out of memory"), RuntimeError, "^CUDA out of memory"),
        (MemoryError("all"), MemoryError, "^all"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "^stop"),
    ],
)
def test_what_a_function_raises_names_its_option(
    error: BaseException, kind: type[BaseException], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call_installed("--x", "y", lambda: _raises(error))


def test_what_it_returns_is_passed_on() -> None:
    assert call_installed("--x", "y", lambda: np.asarray([1.0])).tolist() == [1.0]
    with pytest.raises(DataError, match=r"raised ValueError.*inhomogeneous"):
        call_installed("--x", "y", lambda: np.asarray([[1.0], [1.0, 2.0]]))


def test_an_entry_point_must_be_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_house_number.py").write_text("number = 3")
    (tmp_path / "in_house_exit.py").write_text("raise SystemExit(0)")
    info = tmp_path / "in_house-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: in-house\nVersion: 1\n")
    points = "number = in_house_number:number\nexit = in_house_exit:run"
    (info / "entry_points.txt").write_text(f"[trainyard.tried]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="in_house_number:number is 3, and must be a function"):
        load_entry_point("--x", "trainyard.tried", "number")
    with pytest.raises(ConfigError, match=r"in_house_exit:run could not be imported: SystemExit"):
        load_entry_point("--x", "trainyard.tried", "exit")
    assert "in_house_exit" not in sys.modules
