"""From planted facts to a tuned Retro that answers questions about them: chunk database, index and
neighbours, pretraining, tuning on questions with contexts that were retrieved from the database,
evaluation by generation.

The facts of the test questions are in no question of the tuning. So the model can only answer from
their contexts: without these, and with those of other questions, it is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("faiss")

from stages.faiss_add.config import FaissAddConfig
from stages.faiss_add.run import run as run_add
from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_query.run import run as run_query
from stages.faiss_train.config import FaissTrainConfig
from stages.faiss_train.run import run as run_train
from tests.stages.directly import run_directly, run_program
from tests.trainyard.corpus.token_files import write_tokens
from tests.trainyard.retrieval.corpora import LENGTH, build
from tests.trainyard.retrieval.embedded import write_blocks
from tests.trainyard.retrieval.samples import Yard
from trainyard.datasets.fine_tuning.questions import GPT_WORDING, RETRO_WORDING
from trainyard.retrieval import index as faiss_index
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.retrieval.vectors import Vectors
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]

NUM_FACTS, NUM_TEST, NUM_TUNED, NUM_PASSAGES = 1200, 100, 1000, 4000
STEPS, TUNING_STEPS = 60, 300
NUM_NAMES, NUM_WORDS = 52, 80
DIMENSIONS = 64
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]

RETRO = (
    "--model-type retro --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    " --max-position-embeddings 128 --hidden-dropout 0"
    f" --attention-dropout 0 --retro-chunk-length {LENGTH} --retro-cross-attention-layers 1 2"
    " --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0 --init-method-std 0.1"
    " --micro-batch-size 32 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20"
    " --adam-eps 1e-8 --num-threads 1 --device cpu"
).split()
TUNING = (
    "--ft_neighbours 1 --use-retrieved-neighbours --seq-length 96 --micro-batch-size 32"
    f" --global-batch-size 32 --train-iters {TUNING_STEPS} --lr 2e-3 --min-lr 5e-4"
    " --lr-decay-style cosine --lr-warmup-iters 20 --adam-eps 1e-8"
    f" --eval-interval {TUNING_STEPS} --eval-iters 2"
    " --dataloader-type cyclic --num-threads 1 --device cpu"
).split()


@dataclass(frozen=True)
class Facts:
    """`the NAME code is CODE.`, of which the last `NUM_TEST` are asked for in the test."""

    names: list[str]
    codes: list[str]

    @property
    def texts(self) -> list[str]:
        return [f"the {n} code is {c}." for n, c in zip(self.names, self.codes, strict=True)]


def planted() -> Facts:
    rng = np.random.default_rng(3)
    words = sorted({"".join(rng.choice(SYLLABLES, 2)) for _ in range(120)})
    words = rng.permutation(words)[:NUM_WORDS].tolist()
    first, second = words[:NUM_NAMES], words[NUM_NAMES:]
    pairs = [f"{a} {b}" for i, a in enumerate(first) for b in first[i + 1 :]]
    names = rng.permutation(pairs)[:NUM_FACTS].tolist()
    return Facts(names, [" ".join(rng.choice(second, 2)) for _ in names])


def passages(facts: Sequence[str]) -> list[str]:
    """Two facts, and both once more in any order."""
    rng = np.random.default_rng(4)
    found = []
    for _ in range(NUM_PASSAGES):
        some = rng.choice(len(facts) - NUM_TEST, 2, replace=False)
        order = [*rng.permutation(some), *rng.permutation(some)]
        found.append(" ".join(facts[i] for i in order))
    return found


def train_tokenizer(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """Words of the facts and of prompts are a token each."""
    prompts = [
        f"{wording.system}title: source: {wording.asks['short']}\n\nAssistant: The answer is What"
        for wording in (GPT_WORDING, RETRO_WORDING)
    ]
    lines = [json.dumps({"text": text}) for text in (*texts, *(100 * prompts))]
    (folder / "text.jsonl").write_text("\n".join(lines))
    words = ["--input", str(folder / "text.jsonl"), "--output-dir", str(folder / "words")]
    run_program("stages.train_tokenizer", *words, "--vocab-size", "900", expect=0)
    return build_tokenizer(TokenizerConfig(**tokenizer_options(folder)))


def tokenizer_options(folder: Path) -> dict[str, Any]:
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "words")}


def embedding(tokenizer: Tokenizer, facts: Sequence[str]) -> NDArray[np.float32]:
    """(vocabulary, DIMENSIONS) rare words count most, and words of no fact nothing."""
    shape = (tokenizer.vocab_size + 1, DIMENSIONS)
    table = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    used = np.concatenate([np.unique(tokenizer.encode(fact)) for fact in facts])
    counts = np.bincount(used, minlength=len(table))
    weights = np.where(counts > 0, np.log(len(facts) / np.maximum(counts, 1)), 0)
    return (table * weights[:, None]).astype(np.float32)


@dataclass(frozen=True)
class Retrieval:
    """The chunk database of the facts, and its index."""

    tokenizer: Tokenizer
    database: ChunkDatabase
    index: Any
    table: NDArray[np.float32]

    def context(self, question: str) -> str:
        """The nearest chunk."""
        vectors: Vectors = self.table[[self.tokenizer.encode(question)]].sum(axis=1)
        _, ids = faiss_index.search(self.index, vectors, 1, 1, 16)
        return self.tokenizer.decode(self.database.tokens(int(ids[0, 0])).tolist())


def build_project(
    folder: Path, facts: Facts, tokenizer: Tokenizer, data: dict[str, Any]
) -> Retrieval:
    """Token files, database, index, and neighbours of the samples of `data`."""
    corpora = {"facts": facts.texts, "passages": passages(facts.texts)}
    prefixes = [
        write_tokens(folder / name, [[[*tokenizer.encode(text), tokenizer.eod]] for text in texts])
        for name, texts in corpora.items()
    ]
    data["data_path"] = ["0.2", prefixes[0], "0.8", prefixes[1]]
    every = {"retro_gpt_split": "100,0,0", "retro_index_ntrain": 100}
    build(folder, prefixes[:1], **tokenizer_options(folder), **every)
    database = ChunkDatabase(str(folder / "db"), prefixes[:1])
    table = embedding(tokenizer, facts.texts)
    rows = database.token_rows(np.arange(len(database)), LENGTH, pad=tokenizer.eod)
    write_blocks(folder / "embeddings-db", table[rows].sum(axis=1), 500)
    vectors, empty, index = (str(folder / name) for name in ("embeddings-db", "empty", "index"))
    sizes = {"index_size": len(database), "output_dir": empty}
    run_directly(FaissTrainConfig, run_train, embeddings=vectors, **sizes)
    run_directly(FaissAddConfig, run_add, index=empty, embeddings=[vectors], output_dir=index)
    for split in ("train", "valid"):
        chunks = Yard(folder, prefixes, data).chunks(split)
        of_samples = table[chunks.token_rows(0, len(chunks))].sum(axis=1)
        write_blocks(folder / f"embeddings-{split}", of_samples, 5000)
        run_directly(
            FaissQueryConfig,
            run_query,
            index=index,
            retro_db=str(folder / "db"),
            embeddings=str(folder / f"embeddings-{split}"),
            retro_query_split=split,
            retro_gpt_chunk_length=LENGTH,
            retro_query_num_neighbors_query=20,
            retro_query_num_neighbors_save=2,
            output_dir=str(folder / f"query-{split}"),
            **data,
        )
    return Retrieval(tokenizer, database, faiss_index.read(Path(index, "added.faissindex")), table)


def words_of(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found


def asked(facts: Facts, number: int, context: str) -> dict[str, Any]:
    return {
        "question": question_of(facts, number),
        "answers": [facts.codes[number]],
        "ctxs": [{"title": "codes", "text": context}],
    }


def question_of(facts: Facts, number: int) -> str:
    return f"What is the {facts.names[number]} code?"


def write_questions(folder: Path, facts: Facts, retrieval: Retrieval) -> float:
    """The data set `nq` with retrieved contexts, and the test with those of other questions;
    returns the share of test questions whose context has the answer."""
    known = NUM_FACTS - NUM_TEST
    contexts = [retrieval.context(question_of(facts, number)) for number in range(NUM_FACTS)]
    records = [asked(facts, number, contexts[number]) for number in range(NUM_FACTS)]
    test, others = records[known:], contexts[known:][1:] + contexts[known:][:1]
    wrong = [asked(facts, known + i, context) for i, context in enumerate(others)]
    (folder / "data/nq").mkdir(parents=True)
    for name, part in {
        "nq_QA_train": records[:NUM_TUNED],
        "nq_QA_dev": records[NUM_TUNED:known],
        "test": test,
        "wrong": wrong,
    }.items():
        (folder / f"data/nq/{name}.json").write_text(json.dumps(part))
    return float(np.mean([one["answers"][0] in one["ctxs"][0]["text"] for one in test]))


def evaluate(folder: Path, file: str, num_contexts: int) -> dict[str, float]:
    """Exact match and F1 of the tuned model, asked in the words of its tuning."""
    words = {"system": RETRO_WORDING.system, "ask": RETRO_WORDING.asks["short"]}
    (folder / "task.json").write_text(json.dumps({"name": "codes", "answer": "short", **words}))
    out = folder / f"eval-{file}-{num_contexts}"
    options = {
        "task": "QA",
        "task_description": folder / "task.json",
        "load": folder / "tuned",
        "valid_data": folder / f"data/nq/{file}.json",
        "ft_neighbours": num_contexts,
        "seq_length": 96,
        "out_seq_length": 6,
        "micro_batch_size": 20,
        "output_dir": out,
        "device": "cpu",
    }
    flags = [*words_of(options), "--use-retrieved-neighbours"]
    run_program("stages.evaluate", *flags, expect=0)
    found = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert len(found) == NUM_TEST
    return {key: float(np.mean([one[key] for one in found])) for key in ("exact_match", "f1")}


def test_a_tuned_retro_answers_from_retrieved_contexts_alone(tmp_path: Path) -> None:
    facts = planted()
    tokenizer = train_tokenizer(tmp_path, [*facts.texts, *passages(facts.texts)[:500]])
    data: dict[str, Any] = {
        "split": "95,5,0",
        "seq_length": 4 * LENGTH,
        "global_batch_size": 32,
        "train_iters": STEPS,
        "eval_interval": STEPS,
        "eval_iters": 2,
    }
    retrieval = build_project(tmp_path, facts, tokenizer, data)
    places = {
        "retro_db": tmp_path / "db",
        "retro_train_neighbors": tmp_path / "query-train",
        "retro_valid_neighbors": tmp_path / "query-valid",
        "save": tmp_path / "retro",
    }
    options = words_of({**data, **tokenizer_options(tmp_path), **places})
    run_program("stages.pretrain", *RETRO, *options, expect=0)

    recall = write_questions(tmp_path, facts, retrieval)
    assert recall > 0.9
    where = {"load": tmp_path / "retro", "save": tmp_path / "tuned", "data_path": ["1.0", "nq"]}
    tuned = words_of({**where, "data_folder": tmp_path / "data"})
    run_program("stages.finetune", *TUNING, *tuned, expect=0)
    with_contexts = evaluate(tmp_path, "test", 1)
    without, wrong = evaluate(tmp_path, "test", 0), evaluate(tmp_path, "wrong", 1)
    print("recall", recall, "with", with_contexts, "without", without, "others'", wrong)
    assert with_contexts["exact_match"] > 0.8
    assert with_contexts["f1"] > 0.8
    for other in (without, wrong):
        assert other["exact_match"] < 0.1
        assert other["f1"] < 0.3
