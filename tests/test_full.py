"""`make test-full` runs its parts, records them by commit, and leaves no test out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import full

SAYS = "import sys; print('=== ' + sys.argv[1] + ' in 1.00s ==='); sys.exit(int(sys.argv[2]))"


def part(*summaries: str, status: int = 0) -> full.Part:
    commands = tuple((sys.executable, "-c", SAYS, text, str(status)) for text in summaries)
    return full.Part(1, commands)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one commit, whose parts are three programs that take no time."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path))
    (tmp_path / ".gitignore").write_text(".test-full/\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run((*git, *words), check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(full, "ROOT", tmp_path)
    monkeypatch.setattr(full, "RECORDS", tmp_path / ".test-full")
    known = {
        "quick": part("1 passed", "2 passed, 3 skipped"),
        "broken": part("1 failed, 2 passed", status=1),
        "empty": full.Part(1, ((sys.executable, "-c", "print('no tests ran in 0.01s')"),)),
    }
    monkeypatch.setattr(full, "parts", lambda jobs, third: known)
    return tmp_path


@pytest.mark.slow
def test_only_what_has_not_passed_runs_again(
    repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert full.main([]) == 1
    out = capfd.readouterr().out
    assert "quick     passed" in out
    assert "1 passed; 2 passed, 3 skipped" in out
    assert "broken    FAILED" in out
    assert "empty     FAILED" in out, "a part without a test has not passed"
    assert full.main([]) == 1
    assert "=== quick," not in capfd.readouterr().out
    assert full.main(["quick"]) == 0
    assert "=== quick," in capfd.readouterr().out
    (record,) = (repository / ".test-full").iterdir()
    assert json.loads(record.read_text())["quick"]["passed"]


@pytest.mark.slow
def test_a_changed_tree_certifies_nothing(
    repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (repository / "new.py").write_text("x = 1\n")
    assert full.main(["quick"]) == 0
    capfd.readouterr()
    full.main([])
    assert "=== quick," in capfd.readouterr().out


@pytest.mark.slow
def test_a_part_in_which_the_tree_changes_is_not_recorded(
    repository: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = (sys.executable, "-c", "open('new.py', 'w').write('x = 1'); print('1 passed in 1.00s')")
    monkeypatch.setattr(full, "parts", lambda jobs, third: {"edited": full.Part(1, (edits,))})
    assert full.main(["edited"]) == 2
    assert "the tree changed while edited ran" in capfd.readouterr().err
    assert not (repository / ".test-full").exists()


def test_an_unknown_part_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert full.main(["yards"]) == 2
    assert "no part 'yards'; parts: quick, broken, empty" in capsys.readouterr().err


def test_the_parts_choose_every_test_that_takes_longer_than_a_unit_test() -> None:
    """By the markers: what the unit suite leaves out, but for a cluster of one's own."""
    known = full.parts(2, 0)
    chosen = " ".join(word for one in known.values() for words in one.commands for word in words)
    for marker in ("slow", "kill", "full", "yard", "fuzz"):
        assert marker in chosen
    ignored = {word.partition("=")[2] for word in chosen.split() if word.startswith("--ignore=")}
    named = {word for word in chosen.split() if word.startswith("tests/")}
    assert ignored <= named, "what one part leaves out, another names"
    assert all((full.ROOT.parent / full.ROOT / path).exists() for path in named)
