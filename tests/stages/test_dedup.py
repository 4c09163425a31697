"""The dedup stage: one of each stays, whatever the order of the input, and again nothing goes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from stages.dedup import run as dedup_run
from stages.dedup.config import DedupConfig
from stages.runtime.cli import stage_main
from tests.stages.clean_runs import contents, origin, report, rows, write
from tests.stages.directly import run_directly
from trainyard.corpus import unit_sizes
from trainyard.errors import ConfigError

WORDS = 120
"""In a document."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 12_000)


def text(seed: int, num_changed: int = 0, num_words: int = WORDS) -> str:
    """Random words; `num_changed` of them, evenly spread, are others."""
    rng = random.Random(seed)
    words = [f"w{rng.randrange(10**6)}" for _ in range(num_words)]
    for i in range(num_changed):
        words[(2 * i + 1) * num_words // (2 * num_changed)] = f"changed{seed}x{i}"
    return " ".join(words)


def corpus_rows() -> list[dict[str, Any]]:
    """30 different texts; of five there are exact duplicates, of five near ones."""
    texts = [text(i) for i in range(30)]
    texts += [texts[i] for i in (0, 1, 2, 3, 4, 0)]
    texts += [text(i).replace(" ", "  ", 3) for i in (3,)]
    texts += [text(i, num_changed=2) for i in range(5, 10)]
    return [{"id": i, "text": one} for i, one in enumerate(texts)]


def dedup(source: Path | str, folder: Path | str, **options: Any) -> dict[str, Any]:
    given = {"input": [str(source)], "output_dir": str(folder), "workers": 1, **options}
    return run_directly(DedupConfig, dedup_run.run, **given)


def test_one_of_each_stays_and_the_others_say_which(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", corpus_rows())
    metrics = dedup(source, tmp_path / "out")
    kept, dropped = (rows(tmp_path / "out", kind) for kind in ("documents", "dropped"))
    assert sorted(row["id"] for row in kept + dropped) == list(range(42))
    assert metrics["dropped"] == {"exact": 7, "near": 5, "lines": 0}
    group = {**{i: i for i in range(30)}, 30: 0, 31: 1, 32: 2, 33: 3, 34: 4, 35: 0, 36: 3}
    group |= {37 + i: 5 + i for i in range(5)}
    assert sorted(group[row["id"]] for row in kept) == list(range(30))
    for row in dropped:
        assert group[row["dropped"]["kept"]["id"]] == group[row["id"]]
    near = [row["dropped"]["similarity"] for row in dropped if row["dropped"]["rule"] == "near"]
    expected = (WORDS - 4 - 10) / (WORDS - 4 + 10)  # 2 words are in 10 of 116 shingles
    assert near == [round(expected, 4)] * 5
    clusters = [json.loads(line) for line in (tmp_path / "out/clusters.jsonl").open()]
    assert metrics["clusters"] == len(clusters) == 10
    assert {row["id"] for row in dropped} == {one["id"] for c in clusters for one in c["others"]}


def by_text(folder: Path) -> list[Any]:
    found = [(row["id"], row["text"]) for row in rows(folder, "documents")]
    return sorted(found)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep": "smallest-hash", "lines": "line", "min_line_chars": 5},
    {"lines": "words", "min_run_words": 16},
    {"shingle": "chars", "jaccard": "min", "num_bands": 50, "jaccard_threshold": 0.7},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_the_order_and_the_files_of_the_input_decide_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    given = corpus_rows()
    dedup(write(tmp_path / "in.jsonl", given), tmp_path / "one", **options)
    random.Random(0).shuffle(given)
    write(tmp_path / "many/b.jsonl", given[:25])
    write(tmp_path / "many/a.jsonl", given[25:])
    dedup(tmp_path / "many", tmp_path / "other", **options)
    assert by_text(tmp_path / "one") == by_text(tmp_path / "other")
    assert len(by_text(tmp_path / "one")) == 30


def test_of_an_empty_file_nothing_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [])
    metrics = dedup(source, tmp_path / "out")
    assert (metrics["documents"], metrics["clusters"]) == (0, 0)
    assert report(tmp_path / "out")["kept"] == 0


@pytest.mark.slow
def test_texts_of_signs_alone_are_the_same_only_if_their_signs_are(tmp_path: Path) -> None:
    texts = ["+ - *", "+ - *", "{ } [ ]", "\u2603", " ", ""]
    source = write(tmp_path / "in.jsonl", [{"text": one} for one in texts])
    dedup(source, tmp_path / "out")
    kept = sorted(row["text"].strip() for row in rows(tmp_path / "out", "documents"))
    assert kept == sorted(["+ - *", "{ } [ ]", "\u2603", ""])


def test_again_nothing_goes(tmp_path: Path) -> None:
    dedup(write(tmp_path / "in.jsonl", corpus_rows()), tmp_path / "one")
    metrics = dedup(f"{tmp_path}/one/documents-*.jsonl", tmp_path / "two")
    assert sum(metrics["dropped"].values()) == 0
    assert rows(tmp_path / "two", "documents") == rows(tmp_path / "one", "documents")


def test_lines_that_repeat_others_are_cut(tmp_path: Path) -> None:
    notice = "This notice is at the end of every page of the yard."
    pages = [f"{text(i, num_words=20)}\n{notice}\nshort\n" for i in range(3)]
    source = write(tmp_path / "in.jsonl", [{"text": page} for page in [*pages, notice + "\n"]])
    dedup(source, tmp_path / "out", lines="line", near=False)
    kept, dropped = (rows(tmp_path / "out", kind) for kind in ("documents", "dropped"))
    every = "".join(row["text"] for row in kept)
    assert every.count(notice) == 1
    assert every.count("short\n") == 3  # shorter than --min-line-chars
    assert len(kept) + len(dropped) == 4
    assert [row["dropped"]["rule"] for row in dropped] in ([], ["lines"])
    assert report(tmp_path / "out")["reasons"]["lines"]["removed_lines"] == 3


def test_paragraphs_that_repeat_others_are_cut(tmp_path: Path) -> None:
    shared = "A paragraph that two pages have,\nover two lines."
    pages = [f"{text(0, num_words=9)}\n\n{shared}\n\nEnd", f"{shared}\n\n{text(1, num_words=9)}"]
    source = write(tmp_path / "in.jsonl", [{"text": page} for page in pages])
    dedup(source, tmp_path / "out", lines="paragraph", near=False, min_line_chars=20)
    found = [row["text"] for row in rows(tmp_path / "out", "documents")]
    assert sum(text.count(shared) for text in found) == 1
    assert [text(i, num_words=9) in found[i] for i in (0, 1)] == [True, True]


def test_runs_of_words_that_repeat_others_are_cut(tmp_path: Path) -> None:
    shared = text(100, num_words=60)
    pages = [f"{text(i, num_words=30)} {shared}, {text(i + 50, num_words=30)}" for i in range(3)]
    brief = " ".join(shared.split()[:20])  # too short to be found
    pages.append(f"{text(9, num_words=30)} {brief} {text(10, num_words=30)}")
    source = write(tmp_path / "in.jsonl", [{"text": page} for page in pages])
    options = {"lines": "words", "min_run_words": 40, "near": False}
    dedup(source, tmp_path / "out", **options)
    found = {origin(row): row["text"] for row in rows(tmp_path / "out", "documents")}
    kept = [found[place] for place in sorted(found)]
    assert sum(shared in one for one in kept) == 1
    assert kept[3] == pages[3]
    middle = " ".join(shared.split()[7:-7])
    for i, one in enumerate(kept[:3]):
        assert one.startswith(text(i, num_words=30))
        assert one.endswith(text(i + 50, num_words=30))
        assert (middle in one) == (shared in one)
    assert report(tmp_path / "out")["reasons"]["lines"]["removed_lines"] == 2
    dedup(
        write(tmp_path / "back.jsonl", [{"text": p} for p in pages[::-1]]),
        tmp_path / "b",
        **options,
    )
    assert {row["text"] for row in rows(tmp_path / "b", "documents")} == set(kept)


def test_upstreams_heuristic_leaves_what_left_its_bucket_uncompared(tmp_path: Path) -> None:
    """All three are in the only bucket. The shorter two are alike, and like half of the first:
    with a lower threshold of the bucket they leave it with that one, uncompared."""
    common = text(1, num_words=60)
    two = [f"{common} {text(3, num_words=40)} x{i}" for i in range(2)]
    three = [f"{common} {text(2, num_words=61)}", *two]
    source = write(tmp_path / "in.jsonl", [{"text": one} for one in three])
    options = {"num_permutations": 1, "num_bands": 1, "jaccard_threshold": 0.7, "seed": 10}
    assert dedup(source, tmp_path / "all", **options)["dropped"]["near"] == 1
    options |= {"bucket_threshold": 0.2, "heuristic_iter": 1}
    assert dedup(source, tmp_path / "upstream", **options)["dropped"]["near"] == 0


def test_shares_joined_are_one_run(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", corpus_rows())

    def run(folder: str, *more: str) -> int:
        words = ["--input", str(source), "--output-dir", str(tmp_path / folder), "--workers", "1"]
        return stage_main("dedup", DedupConfig, "stages.dedup.run", argv=[*words, *more])

    assert run("whole") == 0
    for rank in (1, 0):
        assert run("joined", "--rank", str(rank), "--world-size", "2") == 0
    assert run("joined", "--world-size", "2") == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    assert "clusters.jsonl" in contents(tmp_path / "whole")


@pytest.mark.slow
def test_recall_at_the_threshold(tmp_path: Path) -> None:
    """150 planted pairs with a Jaccard index just above 0.8, all of 300 words: at least 98 %."""
    pairs = [text(i, num_changed=n, num_words=300) for i in range(150) for n in (0, 6)]
    source = write(tmp_path / "in.jsonl", [{"text": one} for one in pairs])
    dropped = dedup(source, tmp_path / "out")["dropped"]
    similarity = (296 - 30) / (296 + 30)
    assert similarity == pytest.approx(0.81, abs=0.01)
    assert dropped["near"] >= 0.98 * 150


@pytest.mark.s3
@pytest.mark.slow
def test_on_s3_the_same_bytes(tmp_path: Path, s3_url: str) -> None:
    source = write(tmp_path / "in.jsonl", corpus_rows())
    dedup(source, tmp_path / "local")
    dedup(source, f"{s3_url}/out")
    assert contents(f"{s3_url}/out") == contents(tmp_path / "local")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exact": False, "near": False}, "nothing to compare"),
        ({"num_permutations": 201}, "must be a multiple of --num-bands 25"),
        ({"heuristic_iter": 0}, "at least 1, or -1"),
        ({"jaccard_threshold": 80}, "--jaccard-threshold must be above 0 and at most 1, got 80"),
        ({"bucket_threshold": 0.0}, "--bucket-threshold must be above 0"),
        ({"rank": 3, "world_size": 2}, "--rank 3: shares of --world-size 2 are 0 to 1"),
    ],
)
def test_refusals(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        dedup(tmp_path / "none", tmp_path / "out", **options)
