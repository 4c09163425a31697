"""The evaluation on the card: figures with standard errors, and passports."""

from __future__ import annotations

from typing import Any

from stages.report.evaluations import evaluated_sets

COUNT = "5\N{NARROW NO-BREAK SPACE}153"
PASSPORT = {
    "protocol": {"name": "LAMBADA/megatron", "digest": "a" * 12},
    "data": {"digest": "b" * 64, "examples": 5153},
    "tokenizer": {"digest": "c" * 64, "type": "GPT2BPETokenizer"},
    "code": {"version": "0.1.0", "digest": ""},
    "figures": {"accuracy": {"value": 0.4, "stderr": 0.0068}},
}


def test_each_data_set_has_its_figures_and_its_passport() -> None:
    document = {
        "task": "LAMBADA",
        "sets": [
            {"name": "one.jsonl", "accuracy": 0.4, "num_examples": 5153, "passport": PASSPORT},
            {"name": "two.jsonl", "accuracy": 0.5, "num_cut_contexts": 2},
        ],
    }
    one, two = evaluated_sets(document, "")
    assert one.heading == "Evaluation of one.jsonl, by the protocol of LAMBADA"
    assert one.figures == [("accuracy", "0.4000 \N{PLUS-MINUS SIGN} 0.00680"), ("examples", COUNT)]
    assert ("protocol", f"LAMBADA/megatron \N{MIDDLE DOT} {'a' * 12}") in one.passport
    assert ("data", f"{'b' * 12} \N{MIDDLE DOT} {COUNT} examples") in one.passport
    assert two.others == [("num_cut_contexts", 2)]
    assert two.passport == []


def test_documents_without_passports_or_of_another_shape_are_shown_as_far_as_they_go() -> None:
    (old,) = evaluated_sets({"task": "WIKITEXT103", "ppl": 12.5, "detokenizer": "none"}, "x.txt")
    assert old.heading == "Evaluation of x.txt, by the protocol of WIKITEXT103"
    assert old.figures[0][0] == "perplexity, per token"
    assert old.others == [("detokenizer", "none")]
    broken: dict[str, Any] = {"sets": [{"passport": 7, "accuracy": "high"}, 3], "task": None}
    (shown,) = evaluated_sets(broken, "")
    assert (shown.heading, shown.figures, shown.passport) == ("Evaluation of a text", [], [])
    assert evaluated_sets(None, "x") == []
