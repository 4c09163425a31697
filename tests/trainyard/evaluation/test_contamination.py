"""Overlaps with token files, against every pair of n-grams, and by whom they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.evaluate.config import EvaluateConfig
from stages.evaluate.run import run
from tests.stages.directly import run_directly
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.evaluation.models import byte_tokenizer
from trainyard.corpus.provenance.origins import ProvenanceWriter
from trainyard.errors import ConfigError, DataError
from trainyard.evaluation import contamination
from trainyard.evaluation.contamination import Ngrams, hashed, overlaps
from trainyard.models.gpt.config import GPTConfig

END = 0


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


def test_overlaps_are_those_of_every_pair_of_ngrams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contamination, "BLOCK_TOKENS", 50)  # n-grams lie across blocks
    generator = np.random.default_rng(2)
    letters = np.array(list("abc"))
    texts = ["".join(letters[generator.integers(0, 3, size)]) for size in (4, 30, 5, 9, 60)]
    docs = ["".join(letters[generator.integers(0, 3, size)]) for size in (40, 3, 70, 6, 90)]
    write_tokens(tmp_path / "c", [[[*ids(doc), END]] for doc in docs])
    n = 5
    found = overlaps(Ngrams(texts, byte_tokenizer(), n), [str(tmp_path / "c")])
    for number, text in enumerate(texts):
        starts = range(len(text) - n + 1)
        shared = {i for i in starts if any(text[i : i + n] in doc for doc in docs)}
        within = {d for d, doc in enumerate(docs) for i in starts if text[i : i + n] in doc}
        overlap = found.get(number)
        assert (overlap.ngrams if overlap else set()) == shared
        assert (overlap.documents[str(tmp_path / "c")] if overlap else set()) == within
    assert found


def test_an_overlap_lies_within_one_document(tmp_path: Path) -> None:
    write_tokens(tmp_path / "c", [[ids("abcd")], [ids("efgh")]])
    ngrams = Ngrams(["cdef", "abcd", "ab"], byte_tokenizer(), 4)
    assert set(overlaps(ngrams, [str(tmp_path / "c")])) == {1}
    assert ngrams.is_short == [False, False, True]


def test_equal_hashes_of_other_tokens_are_no_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        contamination, "hashed", lambda tokens, n: np.zeros(len(tokens) - n + 1, np.uint64)
    )
    write_tokens(tmp_path / "c", [[ids("abcdefgh")]])
    found = overlaps(Ngrams(["xyzw", "cdef"], byte_tokenizer(), 4), [str(tmp_path / "c")])
    assert set(found) == {1}
    assert len(set(hashed(np.arange(100), 4).tolist())) == 97


def test_a_row_of_equal_tokens_is_looked_up_once_at_each_place() -> None:
    ngrams = Ngrams(["-" * 60, "a" + "-" * 40], byte_tokenizer(), 13)
    hits = list(ngrams.hits(np.array(ids("-" * 80))))
    assert [place for place, _ in hits] == list(range(80 - 13 + 1))
    (number,) = {number for _, number in hits}
    assert len(ngrams.occurrences(number)) == 60 - 12 + 40 - 12


def test_the_passport_counts_examples_and_documents_are_named(tmp_path: Path) -> None:
    checkpoint, seen = str(tmp_path / "run"), "the yard shunts trains all day long"
    save_gpt(
        checkpoint,
        random_gpt(GPTConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=64)),
    )
    corpus = tmp_path / "corpus"
    write_tokens(corpus, [[[*ids("nothing of the kind"), END]], [[*ids(f"A: {seen}."), END]]])
    writer = ProvenanceWriter()
    writer.add("s3://web/a.jsonl", 0, 10, 1, "first")
    writer.add("s3://web/a.jsonl", 10, 10, 2, "second")
    with Path(f"{corpus}.docs").open("wb") as out:
        writer.write(out)
    data = tmp_path / "lambada.jsonl"
    texts = [seen, "a passage that nobody has seen before now", "short"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out_dir = tmp_path / "out"
    options: dict[str, Any] = {
        "load": checkpoint,
        "valid_data": [str(data)],
        "task": "LAMBADA",
        "device": "cpu",
        "output_dir": str(out_dir),
        "contamination_corpus": [str(corpus)],
        "contamination_documents": True,
    }
    run_directly(EvaluateConfig, run, **options)
    (one,) = json.loads((out_dir / "results.json").read_text())["sets"]
    found = one["passport"]["contamination"]
    assert (found["num_examples"], found["num_contaminated"], found["num_short"]) == (3, 1, 1)
    assert found["clean_figures"]["accuracy"]["count"] == 2
    rows = [json.loads(line) for line in (out_dir / "predictions.jsonl").read_text().splitlines()]
    assert [row["contaminated"] for row in rows] == [len(seen) - 12, 0, 0]
    (named,) = map(json.loads, (out_dir / "contamination.jsonl").read_text().splitlines())
    assert (named["set"], named["example"], named["num_documents"]) == ("lambada.jsonl", 0, 1)
    assert named["documents"] == [
        {
            "tokens": "corpus",
            "document": 1,
            "source": "s3://web/a.jsonl",
            "line": 2,
            "id": "second",
        }
    ]
    with pytest.raises(ConfigError, match=r"writes contamination\.jsonl to --output-dir"):
        run_directly(EvaluateConfig, run, **options | {"output_dir": None})
    write_tokens(corpus, [[[3, 900]]])
    with pytest.raises(DataError, match="has token 900, and the checkpoint's tokenizer has 257"):
        run_directly(EvaluateConfig, run, **options)
