"""Documentation out of sources that are never run."""

from __future__ import annotations

from pathlib import Path

from trainyard.corpus import docstrings as doc

SOURCE = b'''"""The module."""
import sys
sys.exit("imported")


class Outer:
    """A class."""

    def method(self):
        """A method,

        with
            more.
        """
        def inner():
            "Inside."

    @property
    def quiet(self):
        return "no docstring"


try:
    async def waits(): "Waits."
except ImportError:
    def fallback(): """Falls back."""
'''


def test_docstrings_have_qualified_names_and_clean_text() -> None:
    assert list(doc.docstrings(SOURCE)) == [
        ("", "The module."),
        ("Outer", "A class."),
        ("Outer.method", "A method,\n\nwith\n    more."),
        ("Outer.method.inner", "Inside."),
        ("waits", "Waits."),
        ("fallback", "Falls back."),
    ]


def test_a_source_that_cannot_be_parsed_has_none() -> None:
    for broken in (b"print 'python 2'", b"\0", b"x = '\xff'", b"(" * 5000):
        assert list(doc.docstrings(broken)) == []


def test_topics_are_read_from_the_table() -> None:
    source = b"# -*- coding: utf-8 -*-\ntopics = {'b': 'Bee.', 'a': 'A ' 'letter.'}\n"
    assert list(doc.topics(source)) == [("a", "A letter."), ("b", "Bee.")]


def test_modules_are_sorted_and_tests_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/__init__.py", "a/test/t.py", "a/z.py", "site-packages/x.py", "a/n.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert list(doc.module_files(tmp_path)) == ["a/__init__.py", "a/z.py", "b.py"]
    assert doc.module_name("a/__init__.py") == "a"
    assert doc.module_name("a/z.py") == "a.z"


def test_texts_that_cannot_be_used_are_left_out() -> None:
    assert doc.is_wanted("w" * 64)
    assert not doc.is_wanted("w" * 63)
    assert not doc.is_wanted("w" * 64 + "<|endoftext|>")
    assert not doc.is_wanted("w" * 64 + "\ud800")
    assert doc.is_well_documented(SOURCE[:30])
    assert not doc.is_well_documented(b'"""x"""' + b"y = 1\n" * 100)
