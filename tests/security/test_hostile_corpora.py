"""Documents that others wrote, through the stages that make a corpus: each is kept, dropped with a
reason or a bad line, in bounded time, and none steers a terminal or a page."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.clean.config import CleanConfig
from stages.datasheet.config import DatasheetConfig
from stages.datasheet.steps import read_step
from stages.decontaminate.config import DecontaminateConfig
from stages.dedup.config import DedupConfig
from stages.mix.config import MixConfig
from stages.report.collect import datasheet
from stages.runtime.cli import stage_main
from tests.security.test_broken_documents import BROKEN
from tests.stages.clean_runs import forge, prose, report, write
from tests.stages.html_page import Page, check_tags
from trainyard.artifacts import store
from trainyard.collection.datasheet import page
from trainyard.errors import ArtifactError

SOON_SECONDS = 30
"""Of a stage over all documents, on a busy machine; what stalls takes minutes for one."""
MARKUP = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
ESCAPE = "\x1b]0;owned\x07\u202e"
MANY = 30_000

TEXTS = {
    "escapes": ESCAPE * 1000,
    "markup": MARKUP * 100,
    "zeros": "\0" * MANY,
    "marks": "a" + "\u0301\u0323" * MANY,
    "joiners": "a\u200d" * MANY,
    "invisible": "\u200b\u2060\ufeff" * MANY,
    "half characters": "\ud800" * 1000,
    "one word": "a" * 10 * MANY,
    "one letter a word": "a " * MANY,
    "one letter a line": "a\n" * MANY,
    "empty lines": "\n" * MANY,
    "blanks": " \t" * MANY + "a",
    "no-break spaces": "\xa0\u3000" * MANY,
    "digits": "1" * MANY,
    "zeros and points": "0." * MANY,
    "addresses": "1.1.1.1" * MANY,
    "numbers of phones": "+1 (555) 555-555" * MANY,
    "halves of e-mails": "a.b-c@" * MANY,
    "e-mails": "a@b.c" * MANY,
    "links": "http://" * MANY,
    "brackets": "[[{{((" * MANY,
    "quotes": "\u201c\"'" * MANY,
    "braces of code": "{ lorem ipsum javascript" * MANY,
    "full stops": "...\u2026" * MANY,
    "bullets": "\n- \u2022" * MANY,
    "upper case": "\u0130\u1e9e" * MANY,
    "ligatures": "\ufdfa" * MANY,  # NFKC makes 18 characters of each
    "flags": "\U0001f1e6" * MANY,
    "scripts": "a\u0430\u03b1\u0905\u0e01\u4e00" * MANY,
}
FIELDS: dict[str, Any] = {
    "a link that runs": {"url": "javascript:alert(1)//" + MARKUP},
    "a host of markup": {"url": f"http://{MARKUP}/"},
    "a host of escapes": {"url": f"http://{ESCAPE}/"},
    "a host with a password": {"url": "http://user:hunter2@h.org/"},
    "an open bracket": {"url": "http://[::1"},
    "a port that is none": {"url": "http://h:99999999/"},
    "a long link": {"url": "http://" + "a" * 10 * MANY},
    "a link of lists": {"url": [[[1]]]},
    "a licence of markup": {"license": MARKUP},
    "a licence of escapes": {"license": ESCAPE},
    "a licence of a table": {"license": {MARKUP: 1}},
    "a long licence": {"license": "a" * 10 * MANY},
    "a source of markup": {"mixed": {"source": MARKUP, "epoch": -1}},
    "a source of numbers": {"mixed": {"source": 7}},
    "a mixture that is none": {"mixed": "all"},
    "an origin elsewhere": {"origin": {"file": "../../etc/passwd", "offset": -7, "length": 10**12}},
    "an origin of markup": {"origin": {"file": MARKUP, "offset": 0, "length": 1}},
    "an origin of escapes": {"origin": {"file": ESCAPE, "offset": "x"}},
    "an origin that is none": {"origin": 7},
    "a reason of others": {"dropped": {"rule": MARKUP, "why": ESCAPE}},
    "half a key": {"\ud800": "\udfff"},
    "a key of escapes": {ESCAPE: ESCAPE},
    "a number beyond doubles": {"n": 10**300},
    "a deep field": {"deep": json.loads("[" * 200 + "]" * 200)},
}
LINES = {
    **BROKEN,
    "bytes": "\udcff\udcfe",
    "no text": '{"other": 1}',
    "a text of numbers": '{"text": 7}',
    "a text of a table": '{"text": {"a": 1}}',
    "a text twice": '{"text": "a", "text": ["b"]}',
    "NaN and a text": '{"text": "a", "n": NaN}',
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of all of them, between ordinary documents."""
    rows = [{"text": text, "kind": kind} for kind, text in TEXTS.items()]
    rows += [{"text": prose(i), **fields} for i, fields in enumerate(FIELDS.values())]
    rows += [{"text": prose(1000 + i)} for i in range(20)]
    lines = [json.dumps(row) for row in rows] + [line for line in LINES.values() if line]
    path = tmp_path_factory.mktemp("hostile") / "in.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    return str(path)


def make(
    capfd: pytest.CaptureFixture[str],
    stage: str,
    config: type,
    output: tuple[str, str],
    *words: str,
) -> str:
    """Run a stage on it; where its output lies."""
    began, argv = time.process_time(), [*output, "--workers", "1", *words]
    status = stage_main(stage, config, f"stages.{stage}.run", argv=argv)
    told = capfd.readouterr()
    assert status == 0, told.err[-2000:]
    assert time.process_time() - began < SOON_SECONDS
    assert all(character.isprintable() or character == "\n" for character in told.out + told.err)
    assert "hunter2" not in told.out + told.err
    return output[1]


def check_lines(folder: str, count: int) -> None:
    """Each document is there once, kept or dropped."""
    found = 0
    for name in store.list_files(folder):
        if name.endswith(".jsonl") and name.startswith(("documents", "dropped")):
            found += len(
                [json.loads(one) for one in store.read_bytes(f"{folder}/{name}").splitlines()]
            )
    assert found == count


RULES = {
    "openwebtext": ["--tokenizer-type", "ByteLevelTokenizer"],  # which min_tokens counts with
    "wikipedia": [],
    "c4": [],
    "fineweb": [],
}
COUNT = len(TEXTS) + len(FIELDS) + 20 + len(LINES) - 1
Make = Callable[..., str]


@pytest.mark.slow
@pytest.mark.parametrize("preset", RULES)
def test_every_rule_ends_with_every_document(
    preset: str, corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--input", corpus, "--preset", preset, "--on-bad-line", "skip"]
    masks = ["--mask-pii", "emails", "ips", "phones", *RULES[preset]]
    output = ("--output-dir", str(tmp_path / "clean"))
    folder = make(capfd, "clean", CleanConfig, output, *words, *masks)
    check_lines(folder, COUNT)


@pytest.mark.slow
def test_a_corpus_of_them_has_a_sound_datasheet(
    corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def step(stage: str, config: type, given: str, *words: str) -> str:
        output = ("--output-dir", str(tmp_path / stage))
        return make(capfd, stage, config, output, "--input", given, *words)

    skip = ["--on-bad-line", "skip"]
    first = step("clean", CleanConfig, corpus, "--rules", "min_words:limit=2", *skip)
    check_lines(first, COUNT)
    second = step("dedup", DedupConfig, f"{first}/documents-*.jsonl", "--lines", "words")
    leak = tmp_path / "leak.jsonl"
    leak.write_text(json.dumps({"text": prose(1005)}) + "\n")
    task = ["--tasks", "mine", "--task-data", str(leak), "--mode", "drop"]
    third = step("decontaminate", DecontaminateConfig, f"{second}/documents-*.jsonl", *task)
    assert report(third)["kept"] < report(third)["documents"]
    last = step("mix", MixConfig, f"{third}/documents-*.jsonl", "--sources", "web")
    output, folders = ("--output-prefix", str(tmp_path / "sheet")), [first, second, third, last]
    words = ["--documents", f"{last}/documents-*.jsonl", "--folders", *folders]
    titled = ["--title", MARKUP, "--licenses", MARKUP, ESCAPE]
    make(capfd, "datasheet", DatasheetConfig, output, *words, *titled)
    made = (tmp_path / "sheet.html").read_text()
    check_tags(Page(made))
    assert "\x1b" not in made
    assert "\u202e" not in made


VALUES: list[Any] = [
    None,
    True,
    -1,
    7,
    10**30,
    10**400,
    0.5,
    1e308,
    MARKUP,
    [],
    [[1]],
    {},
    {"a": 1},
]


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value of a document, but for all of a list after its first."""
    if above:
        yield above
    if isinstance(document, dict | list) and document:
        for key in document if isinstance(document, dict) else (0,):
            yield from places(document[key], (*above, key))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    copied = copy.deepcopy(document)
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copied


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of stages, by their name, and the data of a datasheet of them."""
    folder = tmp_path_factory.mktemp("reported")
    source = write(folder / "in.jsonl", [{"text": prose(i % 7)} for i in range(12)])
    leak = str(write(folder / "leak.jsonl", [{"text": prose(3)}]))
    given = ["--workers", "1", "--input", str(source)]
    more = {
        "dedup": (DedupConfig, []),
        "decontaminate": (DecontaminateConfig, ["--tasks", "mine", "--task-data", leak]),
        "mix": (MixConfig, ["--sources", "web"]),
    }
    for stage, (config, words) in more.items():
        argv = [*given, "--output-dir", str(folder / stage), *words]
        assert stage_main(stage, config, f"stages.{stage}.run", argv=argv) == 0
    argv = ["--documents", str(source), "--output-prefix", str(folder / "sheet"), "--folders"]
    argv += [str(folder / stage) for stage in more]
    assert stage_main("datasheet", DatasheetConfig, "stages.datasheet.run", argv=argv) == 0
    return {**{stage: folder / stage for stage in more}, "sheet": folder / "sheet.json"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dedup", "decontaminate", "mix"])
def test_a_report_of_others_is_shown_or_refused(stage: str, reported: dict[str, Path]) -> None:
    folder, sheet = reported[stage], json.loads(reported["sheet"].read_text())
    report = json.loads((folder / "report.json").read_text())
    texts = [text for text in BROKEN.values() if text]
    texts += [json.dumps(changed(report, at, one)) for at in places(report) for one in VALUES]
    for text in texts:
        forge(folder, "report.json", text.encode(errors="surrogateescape"))
        with contextlib.suppress(ArtifactError):
            step = read_step(str(folder), 5)
            check_tags(Page(page({**sheet, "steps": [step.document()]})))
    forge(folder, "report.json", json.dumps(report).encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [text for text in LINES.values() if text], ids=range(len(LINES) - 1)
)
def test_clusters_of_others_are_counted_or_refused(line: str, reported: dict[str, Path]) -> None:
    forge(reported["dedup"], "clusters.jsonl", line.encode(errors="surrogateescape"))
    with pytest.raises(ArtifactError, match="not the report of a stage"):
        read_step(str(reported["dedup"]), 5)


@pytest.mark.slow
def test_a_datasheet_of_others_is_on_the_card_or_refused(reported: dict[str, Path]) -> None:
    path = reported["sheet"]
    sheet = json.loads(path.read_text())
    for at in places(sheet):
        for value in VALUES:
            path.write_text(json.dumps(changed(sheet, at, value)))
            with contextlib.suppress(ArtifactError):
                check_tags(Page(str(datasheet(str(path).removesuffix(".json")))))
    path.write_text(json.dumps(sheet))
