"""Documents that pass on unread are those that reading and writing them gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.decontaminate import run as decontaminate_run
from tests.stages.clean_runs import report, rows
from tests.stages.test_decontaminate import QUESTIONS, corpus_rows, decontaminate, sets
from trainyard.collection.contamination.skim import Skimmed, Skimmer
from trainyard.corpus import unit_sizes

__all__ = ["sets"]

TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(QUESTIONS),
    st.tuples(st.text(max_size=9), st.sampled_from(QUESTIONS)).map(" ".join),
)
VALUES = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
DOCUMENTS = st.builds(
    lambda more, text: {**more, "text": text},
    st.dictionaries(st.sampled_from(["id", "%d", "origin", "split_id", "\u00e9"]), VALUES),
    TEXTS,
)


def spelled(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    """A document as a line, in one of the ways that JSON allows."""
    ascii_only, separators = draw(st.booleans()), draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    text = json.dumps(document, ensure_ascii=ascii_only, separators=separators)
    if draw(st.booleans()):  # of ASCII letters, too
        text = text.replace("w", "\\u0077").replace("\\\\u0077", "\\\\w")
    line = text.encode(errors="surrogatepass")
    return draw(st.sampled_from([b"", b"", b" "])) + line + draw(st.sampled_from([b"", b"", b"\r"]))


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    """The lines of a file."""
    lines = [spelled(draw, one) for one in draw(st.lists(DOCUMENTS, min_size=1, max_size=6))]
    odd = st.sampled_from([b"", b"  ", b'{"text": "nan", "x": NaN}', b'{"text": "half \\ud800"}'])
    if draw(st.integers(0, 3)) == 0:
        lines.insert(draw(st.integers(0, len(lines))), draw(odd))
    return b"\n".join(lines) + draw(st.sampled_from([b"\n", b""]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "drop"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=inputs())
def test_lines_that_pass_on_unread_are_the_documents_that_are_read(
    tmp_path_factory: pytest.TempPathFactory, sets: dict[str, Any], mode: str, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    source = folder / "100% of it.jsonl"
    source.write_bytes(data)
    options = {**sets, "mode": mode, "on_bad_line": "skip", "remove_char_each_side": 3}
    decontaminate(source, folder / "lines", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.decontaminate.count._have_origin", lambda rows, key: {None})
        decontaminate(source, folder / "read", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.decontaminate.count.SKIMMED_BYTES", 0)
        decontaminate(source, folder / "skimmed", **options)
    for kind in ("documents", "dropped"):
        theirs = rows(folder / "read", kind)
        for name in ("lines", "skimmed"):
            assert (ours := rows(folder / name, kind)) == theirs
            assert [list(one) for one in ours] == [list(one) for one in theirs]
    assert report(folder / "lines") == report(folder / "skimmed") == report(folder / "read")
    files = [{path.name for path in (folder / one).glob("d*.jsonl")} for one in ("lines", "read")]
    assert files[0] == files[1], "a file without documents is in none"


@pytest.mark.slow
def test_plain_lines_are_skimmed_and_give_what_reading_gives(
    tmp_path: Path, sets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in corpus_rows()))
    decontaminate(tmp_path / "in.jsonl", tmp_path / "read", **sets)
    skim, found = Skimmer.skim, []

    def noted(self: Skimmer, block: bytes) -> Skimmed | None:
        found.append(skim(self, block))
        return found[-1]

    monkeypatch.setattr(Skimmer, "skim", noted)
    monkeypatch.setattr("stages.decontaminate.count.SKIMMED_BYTES", 0)
    decontaminate(tmp_path / "in.jsonl", tmp_path / "skimmed", **sets)
    assert sum(one.num_lines for one in found if one is not None) == 20
    assert sum(len(one.suspects) for one in found if one is not None) == 5
    for kind in ("documents", "dropped"):
        assert rows(tmp_path / "skimmed", kind) == rows(tmp_path / "read", kind)
    assert report(tmp_path / "skimmed") == report(tmp_path / "read")


@pytest.mark.slow
def test_threads_that_skim_side_by_side_give_what_one_gives(
    tmp_path: Path, sets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"".join(orjson.dumps(row) + b"\n" for row in corpus_rows()) * 500
    (tmp_path / "in.jsonl").write_bytes(lines)
    monkeypatch.setattr("stages.decontaminate.count.SKIMMED_BYTES", 0)
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 1 << 17)
    for workers in (1, 2):
        options = {**sets, "workers": workers, "key_threshold": 0}
        decontaminate(tmp_path / "in.jsonl", tmp_path / f"by-{workers}", **options)
    files = sorted(path.name for path in (tmp_path / "by-1").glob("d*.jsonl"))
    assert len(files) > 8
    for name in files:
        assert (tmp_path / "by-2" / name).read_bytes() == (tmp_path / "by-1" / name).read_bytes()
    assert report(tmp_path / "by-2") == report(tmp_path / "by-1")


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_a_line_keeps_its_bytes(tmp_path: Path, sets: dict[str, Any], name: str) -> None:
    lines = [json.dumps(one, ensure_ascii=True, indent=None) for one in corpus_rows()]
    lines[0] = '{"text" : "\\u0041 caf\\u00e9", "n": 1.50}'
    data = "\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    decontaminate(tmp_path / name, tmp_path / "out", **sets)
    first = (tmp_path / "out/documents-00000.jsonl").read_bytes().split(b"\n")[0]
    assert first == lines[0][:-1].encode() + (
        b',"origin":{"file":"%s","offset":0,"length":%d},"split_id":"nq-lambada-0000000001-0000"}'
        % (name.encode(), len(lines[0]))
    )
    assert orjson.loads(first)["text"] == "A caf\u00e9"


def test_a_key_that_stands_twice_does_not_pass_on_unsearched(
    tmp_path: Path, sets: dict[str, Any]
) -> None:
    line = json.dumps({"text": QUESTIONS[0]})[:-1] + ', "text": "nothing"}'
    (tmp_path / "in.jsonl").write_text(line + "\n")
    decontaminate(tmp_path / "in.jsonl", tmp_path / "out", **{**sets, "key_threshold": 0})
    assert QUESTIONS[0] not in (tmp_path / "out/documents-00000.jsonl").read_text()


def test_a_file_that_lost_a_document_since_it_was_counted_is_an_error(
    tmp_path: Path, sets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    data = "".join(json.dumps(one) + "\n" for one in corpus_rows())
    source.write_text(data)
    write_common = decontaminate_run.write_common

    def shorten(folder: Path, common: list[str]) -> None:
        source.write_text(data.replace("}\n", " }", 1))
        write_common(folder, common)

    monkeypatch.setattr(decontaminate_run, "write_common", shorten)
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 1 << 20)
    with pytest.raises(Exception, match="had 20 documents when they were counted, and 19 now"):
        decontaminate(source, tmp_path / "out", **sets)
