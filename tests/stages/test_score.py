"""stages.score: which documents stay, what the report says, and whose scores they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stages.score.config import ScoreConfig
from stages.score.run import run
from tests.stages.clean_runs import contents, forge, rows, write
from tests.stages.directly import run_directly, run_program
from trainyard.collection.options import DocumentsConfig
from trainyard.errors import DataError

SCORES = [0.9, 0.1, None, 0.3, 0.2, 0.8]


def in_file(path: Path, *documents: dict[str, Any]) -> dict[str, Any]:
    """Options for annotated documents, with numbers in `id`."""
    write(path, ({**document, "id": n} for n, document in enumerate(documents)))
    return {"input": [str(path)], "output_dir": f"{path}.out", "classifier": "annotated"}


@pytest.fixture
def annotated(tmp_path: Path) -> Path:
    """Six texts with scores of another program."""
    return write(
        tmp_path / "annotated.jsonl",
        (
            {
                **{"text": "" if score is None else f"text {i}", "prompt": f"p{i // 3}", "id": i},
                "score": None if score is None else {"toxicity": score, "threat": 0.5},
            }
            for i, score in enumerate(SCORES)
        ),
    )


def score(**options: Any) -> dict[str, Any]:
    return run_directly(ScoreConfig, run, workers=1, **options)


def of(folder: Path, kind: str) -> list[Any]:
    return [row["id"] for row in rows(folder, kind)]


def test_the_half_with_the_lowest_scores_stays(annotated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    metrics = score(
        input=[str(annotated)], output_dir=str(out), classifier="annotated", keep_fraction=0.5
    )
    assert of(out, "documents") == [1, 3, 4]
    assert of(out, "dropped") == [0, 2, 5]
    assert rows(out, "documents")[0]["score"] == {"toxicity": 0.1, "threat": 0.5}
    whys = [row["dropped"]["why"] for row in rows(out, "dropped")]
    assert whys == ["toxicity 0.9", "empty text", "toxicity 0.8"]
    assert metrics["scores"]["all"]["scored"] == 5
    assert metrics["scores"]["kept"]["max"] == 0.3
    assert metrics["scores"]["prompts"]["all"]["expected_maximum"] == pytest.approx(0.85)
    assert json.loads((out / "report.json").read_text())["scores"] == metrics["scores"]


def test_an_empty_text_never_stays_and_the_reason_says_why(tmp_path: Path) -> None:
    documents: list[dict[str, Any]] = [
        {"text": " ", "score": {"toxicity": 0.0, "threat": 0.1}},
        {"text": "unscored", "score": None},
        {"text": "unscored here", "score": {"toxicity": None, "threat": 0.3}},
        {"text": "", "id": 3},
        {"text": "kind", "score": {"toxicity": 0.2}},
        {"text": "rude", "score": {"toxicity": 0.9}},
    ]
    given = in_file(tmp_path / "in.jsonl", *documents)
    score(**given, keep_fraction=0.2)
    out = Path(given["output_dir"])
    assert of(out, "documents") == [4]
    dropped = rows(out, "dropped")
    whys = [row["dropped"]["why"] for row in dropped]
    assert whys == ["empty text", "no score", "no score", "empty text", "toxicity 0.9"]
    assert dropped[0]["score"] == {"toxicity": None, "threat": 0.1}
    assert dropped[3]["score"] is None
    again = {"input": [f"{out}/dropped-00000.jsonl"], "output_dir": str(tmp_path / "again")}
    metrics = score(**again, classifier="annotated")
    assert metrics["scores"]["all"]["scored"] == 1


def test_a_score_of_another_kind_is_not_lost(tmp_path: Path) -> None:
    """FineWeb-Edu and dumps of Reddit have a number there."""
    given = in_file(tmp_path / "in.jsonl", {"text": "a", "score": 3.7})
    with pytest.raises(DataError, match=r"in\.jsonl, byte 0: has 3\.7 in 'score'.*rename that key"):
        score(**given)


def test_a_fraction_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    given = in_file(tmp_path / "in.jsonl", {"text": "a", "score": {"toxicity": 0.1}}, {"text": ""})
    with pytest.raises(DataError, match=r"0\.4 keeps none of 2 documents, 1 of which have a score"):
        score(**given, keep_fraction=0.4)
    assert not (tmp_path / "in.jsonl.out/report.json").exists()


def test_the_toxicity_of_prompts_divides_them(annotated: Path, tmp_path: Path) -> None:
    prompts = write(
        tmp_path / "prompts.jsonl",
        [{"prompt": {"text": "p0", "toxicity": 0.9}}, {"text": "p1", "toxicity": None}],
    )
    given = {"input": [str(annotated)], "classifier": "annotated", "prompt_path": str(prompts)}
    found = score(**given, output_dir=str(tmp_path / "out"))["scores"]["prompts"]
    assert [found[kind]["prompts"] for kind in ("all", "toxic", "nontoxic")] == [2, 1, 0]
    write(prompts, [{"text": "others", "toxicity": 0.9}])
    with pytest.raises(DataError, match="has the toxicity of no prompt that a document continues"):
        score(**given, output_dir=str(tmp_path / "other"))


def test_a_trained_classifier_scores(tmp_path: Path) -> None:
    labels = [{"text": f"dull fools {i}", "label": 1} for i in range(20)]
    labels += [{"text": f"kind words {i}", "label": 0} for i in range(20)]
    documents = [{"text": "fools", "id": 0}, {"text": "words", "id": 1}, {"text": " ", "id": 2}]
    given = {
        "input": [str(write(tmp_path / "texts.jsonl", documents))],
        "classifier": "ngrams",
        "classifier_data": str(write(tmp_path / "labels.jsonl", labels)),
        "attribute": "rudeness",
    }
    metrics = score(**given, output_dir=str(tmp_path / "out"))
    found = [row["score"] for row in rows(tmp_path / "out", "documents")]
    assert found[0]["rudeness"] > 0.5 > found[1]["rudeness"]
    assert found[2] is None
    assert metrics["classifier"]["trained_on"] + metrics["classifier"]["held_out"] == 40
    assert metrics["scores"]["all"]["toxic_share"] == 0.5


def test_shares_make_the_output_of_one_run(tmp_path: Path) -> None:
    texts = [
        write(tmp_path / f"in/{n}.jsonl", ({"text": f"w{i * n % 7}", "id": i} for i in range(9)))
        for n in (1, 2, 3)
    ]
    labels = [{"text": f"w{i % 7}", "label": int(i % 7 > 3)} for i in range(60)]
    given = {
        **{"input": [str(path) for path in texts], "classifier": "ngrams", "keep_fraction": 0.4},
        "classifier_data": str(write(tmp_path / "labels.jsonl", labels)),
    }
    score(**given, output_dir=str(tmp_path / "whole"))
    words = ["--input", *given["input"], "--classifier", "ngrams", "--keep-fraction", "0.4"]
    words += ["--classifier-data", given["classifier_data"], "--workers", "1"]
    words += ["--output-dir", str(tmp_path / "joined"), "--world-size", "2"]
    for rank in ("0", "1"):
        run_program("stages.score", *words, "--rank", rank, expect=0)
    share = tmp_path / "joined.shares/00001-of-00002"
    trained = (share / "classifier-00001.json").read_bytes()
    forge(share, "classifier-00001.json", trained.replace(b'"weights": "', b'"weights": "0'))
    other = run_program("stages.score", *words, expect=1)
    assert "00001-of-00002: trained other weights than" in other.err
    forge(share, "classifier-00001.json", trained)
    run_program("stages.score", *words, expect=0)
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


def test_scores_that_changed_after_a_kill_are_made_again(
    annotated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size, as by a flipped bit."""
    given = {"input": [str(annotated)], "classifier": "annotated", "keep_fraction": 0.5}
    score(**given, output_dir=str(tmp_path / "clean"))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("stages.score.run.measure", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            score(**given, output_dir=str(out))
    (file,) = out.glob(".work/*/scores/scores-00000.*")
    data = file.read_bytes()
    file.write_bytes(bytes([*data[:-1], data[-1] ^ 1]))
    score(**given, output_dir=str(out))
    assert contents(out) == contents(tmp_path / "clean")


PLUG_IN = """
import numpy as np

def length(texts):
    return np.array([len(text) / 100 for text in texts])

def percent(texts):
    return length(texts) * 100

def pairs(texts):
    return np.ones((len(texts), 2))

def quits(texts):
    raise SystemExit(0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with classifiers."""
    (tmp_path / "in_house_safety.py").write_text(PLUG_IN)
    info = tmp_path / "in_house_safety-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: in-house-safety\nVersion: 2.1\n")
    names = ("length", "percent", "pairs", "quits", "missing")
    points = "\n".join(f"{name} = in_house_safety:{name}" for name in names)
    (info / "entry_points.txt").write_text(f"[trainyard.classifiers]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
def test_a_classifier_of_another_package_scores(annotated: Path, tmp_path: Path) -> None:
    given = {"input": [str(annotated)], "output_dir": str(tmp_path / "out")}
    score(**given, classifier="length")
    found = [row["score"] for row in rows(tmp_path / "out", "documents")]
    assert found[0] == {"toxicity": 0.06, "threat": 0.5}
    assert found[2] is None
    documents = DocumentsConfig(input=(str(annotated),))
    config = ScoreConfig(documents=documents, output_dir="o", classifier="length")
    assert config.versions() == {"in-house-safety": "2.1"}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--classifier ngrams", 2, "--classifier ngrams needs --classifier-data"),
        ("--classifier annotated --classifier-data x.jsonl", 2, "leave it out"),
        ("--classifier annotated --keep-fraction 1", 2, "must be above 0 and below 1, got 1.0"),
        ("--classifier annotated --attribute a/b", 2, "--attribute 'a/b'"),
        ("--classifier perspective", 2, "no installed package has an entry point of this name"),
        ("--classifier missing", 2, "in_house_safety:missing could not be imported"),
        ("--classifier percent", 1, "gave 6.0 for the text 'a text'"),
        ("--classifier pairs", 1, "gave float64 (1, 2) for 1 texts"),
        ("--classifier quits", 1, "--classifier quits: raised SystemExit(0)"),
        ("--classifier annotated --attribute insult", 1, "byte 0: --classifier annotated reads"),
    ],
)
def test_wrong_options_and_scores_are_refused(
    annotated: Path, tmp_path: Path, words: str, status: int, message: str
) -> None:
    out = ("--output-dir", str(tmp_path / "out"), "--workers", "1")
    done = run_program("stages.score", "--input", str(annotated), *words.split(), *out)
    assert done.status == status, done.err
    assert message in done.err
    assert not (tmp_path / "out/manifest.json").exists()
