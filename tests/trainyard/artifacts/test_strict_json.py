"""One reader of JSON: what has no one meaning, or exhausts a parser, is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import read_listed, read_listed_json
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.strict_json import MAX_DEPTH
from trainyard.errors import ArtifactError

BROKEN = {
    "{": "not a JSON document",
    '{"a": 1, "a": 2}': "'a' is given twice",
    "[NaN]": "NaN is not a number of JSON",
    "[1e999]": "'1e999' is not finite",
    "[" * 100_000 + "]" * 100_000: "nested too deeply",
    '{"a":' * 100_000 + "1" + "}" * 100_000: "nested too deeply",
    "[" * 300 + "]" * 300: "nested too deeply",
    "9" * 5000: "not a JSON document",
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:16])
def test_a_document_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    record = FileRecord("a.json", len(text), digest_bytes(text.encode()))
    with pytest.raises(ArtifactError, match=f"a.json: .*{BROKEN[text]}"):
        store.read_json(str(path))
    with pytest.raises(ArtifactError, match=f"a.json: .*{BROKEN[text]}"):
        read_listed_json(str(path), record)


def test_a_document_of_the_depth_that_is_allowed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert store.read_json(str(path)) is not None


def test_a_file_is_read_as_its_manifest_lists_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.join(store_url, "a.json")
    record = store.write_bytes(url, b'{"a": 1}')
    assert read_listed(url, record) == b'{"a": 1}'
    assert read_listed_json(url, record) == {"a": 1}
    with pytest.raises(ArtifactError, match=r"a\.json: manifest\.json does not list it"):
        read_listed(url, None)
    store.write_bytes(url, b'{"a": 2}')
    with pytest.raises(ArtifactError, match=r"a\.json: digest \w+, manifest\.json says \w+; "):
        read_listed(url, record)
    store.write_bytes(url, b'{"a": 1} ')
    monkeypatch.setattr(store, "read_bytes", None)  # its size tells, and it may be huge
    with pytest.raises(ArtifactError, match=r"a\.json: 9 bytes, manifest\.json says 8 bytes"):
        read_listed(url, record)
