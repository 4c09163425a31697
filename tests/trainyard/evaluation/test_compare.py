"""Standard errors by hand, paired tests against their definitions, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.compare import comparison
from stages.compare import main as compare_main
from stages.ensemble import main as ensemble_main
from stages.ensemble import run as run_ensemble
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.evaluation.compare import RESAMPLES, bootstrap_p, mcnemar
from trainyard.evaluation.metrics import Metric
from trainyard.evaluation.passport import read_results, rows_name, set_names

ACCURACY = Metric("is_right")


def evaluation(
    folder: Path,
    rows: list[dict[str, Any]],
    metrics: dict[str, Metric] | None = None,
    **passport: Any,
) -> str:
    """A folder as stages.evaluate writes it."""
    folder.mkdir()
    figures = {name: m.document(rows) for name, m in (metrics or {"accuracy": ACCURACY}).items()}
    parts = {
        "protocol": {"name": "LAMBADA/megatron", "digest": "p", "definition": {"longest": 8}},
        "data": {"digest": "d"},
        "checkpoint": {"digest": folder.name},
        "tokenizer": {"digest": "t"},
        "figures": figures,
    }
    one = {"name": "a.jsonl", "rows": rows_name(0), "passport": {**parts, **passport}}
    (folder / "results.json").write_text(json.dumps({"format_version": 2, "sets": [one]}))
    text = "".join(json.dumps({"example": n, **row}) + "\n" for n, row in enumerate(rows))
    (folder / rows_name(0)).write_text(text)
    return str(folder)


def right(*flags: int) -> list[dict[str, Any]]:
    return [{"is_right": flag} for flag in flags]


def test_the_standard_error_of_a_mean_is_that_of_its_examples() -> None:
    found = ACCURACY.document(right(1, 1, 0, 1, 0))
    assert found["value"] == 0.6
    assert found["stderr"] == pytest.approx(np.std([1, 1, 0, 1, 0], ddof=1) / math.sqrt(5))
    assert ACCURACY.document(right(1))["stderr"] is None
    assert ACCURACY.document([{"is_right": None}])["value"] is None


def test_the_standard_error_of_a_perplexity_is_that_of_many_texts() -> None:
    generator, metric = np.random.default_rng(3), Metric("loss", "targets", exponential=True)

    def text() -> list[dict[str, Any]]:
        targets = generator.integers(5, 40, 100)
        losses = targets * (2.0 + generator.normal(0.0, 0.4, 100))
        return [{"loss": x, "targets": t} for x, t in zip(losses, targets, strict=True)]

    found = [metric.document(text()) for _ in range(400)]
    spread = float(np.std([one["value"] for one in found], ddof=1))
    assert np.mean([one["stderr"] for one in found]) == pytest.approx(spread, rel=0.1)


def test_mcnemar_is_the_binomial_test_of_what_only_one_got_right() -> None:
    a, b = np.array([1.0] * 3 + [0.0] * 9 + [1.0] * 5), np.array([0.0] * 3 + [1.0] * 14)
    expected = 2 * sum(math.comb(12, k) for k in range(4)) / 2**12  # 3 against 9
    assert mcnemar(a, b) == pytest.approx(expected)
    assert mcnemar(a, a) == 1.0
    assert mcnemar(np.zeros(5000), np.ones(5000)) < 1e-300


def test_the_bootstrap_counts_draws_on_the_other_side() -> None:
    draws = np.array([1.0] * 95 + [-1.0] * 5)
    assert bootstrap_p(draws) == pytest.approx(2 * 6 / 101)
    assert bootstrap_p(np.zeros(10)) == 1.0


def test_a_difference_is_found_where_there_is_one(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", right(*[1, 0] * 100))
    b = evaluation(tmp_path / "b", right(*[1, 0] * 80, *[1] * 40))
    lines = comparison(a, b)
    assert lines[0] == "a.jsonl: LAMBADA/megatron (protocol p)"
    assert lines[1].startswith("  checkpoint differs: a and b")
    assert "A 0.5  B 0.6  B - A +0.1 [+0.06, +0.145]" in lines[2]
    assert f"p {2 / 2**20:.3g} (McNemar, exact; 200 examples): B is better" in lines[2]
    assert comparison(a, a)[-1].endswith("equal, up to rounding")
    close = evaluation(tmp_path / "c", right(*[1, 0] * 99, 1, 1))
    assert comparison(a, close)[-1].endswith("no difference that these examples show")


def test_losses_are_compared_by_the_paired_bootstrap(tmp_path: Path) -> None:
    metrics = {"ppl": Metric("loss", "targets", "lower", exponential=True, of_tokens=True)}
    metrics["bits"] = Metric("loss", "targets", "lower", factor=0.25)
    generator = np.random.default_rng(7)
    losses = generator.uniform(1, 9, 60)
    rows = [{"loss": x, "targets": 4} for x in losses]
    better = [{"loss": x - 0.1 + generator.normal(0, 0.05), "targets": 4} for x in losses]
    a, b = evaluation(tmp_path / "a", rows, metrics), evaluation(tmp_path / "b", better, metrics)
    found = comparison(a, b)
    # Examples differ far more from each other than the two evaluations do.
    assert all(f"p {2 / (RESAMPLES + 1):.3g} (paired bootstrap" in line for line in found[-2:])
    assert all(line.endswith("B is better") for line in found[-2:])
    other = evaluation(tmp_path / "c", better[:50], metrics, tokenizer={"digest": "other"})
    lines = comparison(a, other)
    assert "not compared, as the tokenizers differ: ppl" in lines[-1]
    assert "bits" in lines[-2]
    assert "unpaired, by standard errors" in lines[-2]


def test_other_protocols_and_other_data_are_refused_with_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = evaluation(tmp_path / "a", right(1, 0))
    protocol = {"name": "LAMBADA/lm-eval", "digest": "q", "definition": {"longest": 9}}
    b = evaluation(tmp_path / "b", right(1, 0), protocol=protocol, data={"digest": "e"})
    with pytest.raises(ConfigError) as refused:
        comparison(a, b)
    message = str(refused.value)
    assert "name: 'LAMBADA/megatron' and 'LAMBADA/lm-eval'; longest: 8 and 9" in message
    assert "and in their data (digests d and e)" in message
    assert compare_main([a, b]) == 2
    assert "cannot be compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[", "Expecting value"),
        ('{"format_version": 1, "task": "WIKITEXT103"}', "no results with passports"),
        ('{"format_version": 2, "sets": []}', "names no data set"),
        ('{"format_version": 2, "sets": [{"passport": {}}]}', "no digest of its protocol"),
    ],
)
def test_folders_without_passports_are_refused(tmp_path: Path, document: str, message: str) -> None:
    (tmp_path / "results.json").write_text(document)
    with pytest.raises(ArtifactError, match=message):
        read_results(str(tmp_path))


def test_a_file_of_rows_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = Path(evaluation(tmp_path / "a", right(1, 0)))
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text.replace(rows_name(0), "../secret.jsonl"))
    with pytest.raises((ArtifactError, ConfigError, ValueError), match="secret"):
        read_results(str(folder))


def test_data_sets_of_the_second_alone_are_named(tmp_path: Path) -> None:
    a, b = (evaluation(tmp_path / name, right(1, 0)) for name in "ab")
    document = json.loads((tmp_path / "b" / "results.json").read_text())
    other = json.loads(json.dumps(document["sets"][0]))
    other["name"], other["passport"]["data"]["digest"] = "b.jsonl", "e"
    document["sets"].append(other)
    (tmp_path / "b" / "results.json").write_text(json.dumps(document))
    assert comparison(a, b)[-1] == "not in A, so not compared: b.jsonl"


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"name a folder that stages\.evaluate wrote"):
        read_results(str(tmp_path))


def test_names_of_data_sets_are_distinct() -> None:
    assert set_names(["s3://b/x.txt", "/y/z.txt"]) == ["x.txt", "z.txt"]
    assert set_names(["RACE/dev/middle/", "RACE/test/middle"]) == ["dev/middle", "test/middle"]
    assert set_names(["a/b", "a/b"]) == ["b#0", "b#1"]


def test_an_ensemble_is_the_mean_of_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*probabilities: list[float]) -> list[dict[str, Any]]:
        return [
            {"probabilities": p, "gold": 0, "is_right": int(p[0] > p[1])} for p in probabilities
        ]

    a = evaluation(tmp_path / "a", rows([0.9, 0.1], [0.4, 0.6], [0.3, 0.7]))
    b = evaluation(tmp_path / "b", rows([0.4, 0.6], [0.9, 0.1], [0.4, 0.6]))
    out = str(tmp_path / "out")
    assert ensemble_main([a, b, "--output-dir", out]) == 0
    assert "a.jsonl: correct / total = 2 / 3 = 66.6667 %" in capsys.readouterr().out
    (found,) = read_results(out)
    assert found.rows()[0]["probabilities"] == pytest.approx([0.65, 0.35])
    assert found.passport["figures"]["accuracy"]["value"] == pytest.approx(2 / 3)
    for place, words in ((f"{b}/", "is a member"), (f"{tmp_path}/stage", "holds an artifact")):
        (tmp_path / "stage").mkdir(exist_ok=True)
        (tmp_path / "stage" / "manifest.json").touch()
        assert ensemble_main([a, b, "--output-dir", place]) == 2
        assert words in capsys.readouterr().err
    assert read_results(b)[0].passport["checkpoint"] == {"digest": "b"}
    assert comparison(a, out)  # the results of an ensemble are compared as all others
    without = evaluation(tmp_path / "c", right(1, 0, 1))
    assert ensemble_main([a, without]) == 1
    assert "has no probabilities of classes" in capsys.readouterr().err
    assert ensemble_main([a]) == 2
    short = evaluation(tmp_path / "d", rows([0.9, 0.1]))
    with pytest.raises(DataError, match="have 3 and 1 rows"):
        run_ensemble([a, short], None)
