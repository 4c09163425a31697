"""The code digest sees every source that a stage reaches, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trainyard.artifacts import code_digest


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "stages/a/page.html.j2": "",
        "stages/a/run.py": "from trainyard.x import one\n",
        "trainyard/x.py": "def f():\n    from trainyard.rooms import (\n  y,\n  z)\n",
        "trainyard/rooms/__init__.py": "",
        "trainyard/rooms/y.py": "import trainyard.deep.w\n",
        "trainyard/rooms/z.py": "import os\n",
        "trainyard/deep/w.py": "",
        "trainyard/unused/page.j2": "",
        "trainyard/unused/y.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    code_digest._file_digests.cache_clear()
    return tmp_path


def test_imports_are_followed_through_packages_functions_and_brackets(tree: Path) -> None:
    assert sorted(code_digest.sources("stages.a.run")) == [
        "stages/a/page.html.j2",
        "stages/a/run.py",
        "trainyard/deep/w.py",
        "trainyard/rooms/__init__.py",
        "trainyard/rooms/y.py",
        "trainyard/rooms/z.py",
        "trainyard/x.py",
    ]


def test_the_digest_changes_with_what_is_used_only(tree: Path) -> None:
    before = code_digest.code_digest("stages.a.run")
    (tree / "trainyard/unused/y.py").write_text("changed = 1\n")
    code_digest._file_digests.cache_clear()
    assert code_digest.code_digest("stages.a.run") == before
    for name in ("trainyard/deep/w.py", "stages/a/page.html.j2"):
        (tree / name).write_text("changed = 1\n")
        code_digest._file_digests.cache_clear()
        after = code_digest.code_digest("stages.a.run")
        assert after != before
        before = after
    shutil.rmtree(tree)
