"""Command lines of every stage on a corpus of a few documents, chained as the flow chains them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.trainyard.embedding.encoders import make
from tests.trainyard.retrieval.embedded import clustered, write_blocks
from trainyard.artifacts.urls import join, local_path
from trainyard.retrieval.chunk_database import ChunkDatabase
from trainyard.testing.kill import Zygote
from trainyard.tokenizers.wordpiece import SPECIAL

DOCUMENTS = 60
CHUNKS = 96
"""Of 8 tokens, in the samples of the training below."""
TEXT = "the yard shunts every train of words onto the right track before dawn"

MODEL = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--swiglu", "--disable-bias-linear", "--hidden-dropout", "0.1", "--attention-dropout", "0"),
    *("--make-vocab-size-divisible-by", "8"),
)
TRAINING = (
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "6"),
    *("--save-interval", "2", "--eval-interval", "3", "--eval-iters", "1", "--lr", "0.001"),
    *("--split", "90,10,0", "--log-interval", "2"),
)


class Yard:
    """Places of a small yard, and the arguments that make each of its artifacts."""

    def __init__(self, root: str) -> None:
        self.root = root

    def at(self, *parts: str) -> str:
        """A place in the yard."""
        return join(self.root, *parts)

    def arguments(self, stage: str, output: str) -> list[str]:
        """The arguments of a stage that writes to `output` and reads what the yard holds."""
        flags = {"pretrain": "--save", "quantize": "--save-dir", "reshard": "--save-dir"}
        flags |= dict.fromkeys(("datasheet", "tokenize", "merge", "report"), "--output-prefix")
        return [*self._inputs()[stage], flags.get(stage, "--output-dir"), output]

    def manifest(self, stage: str, output: str) -> str:
        """Where the manifest of that output lies."""
        prefix = stage in ("datasheet", "tokenize", "merge", "report")
        return f"{output}.manifest.json" if prefix else join(output, "manifest.json")

    def prepare(self, zygote: Zygote) -> None:
        """Make the corpus, then every artifact in the order of the flow."""
        self._write_corpus()
        self._write_vocabulary()
        self._write_encoder()
        for stage, output in {
            "train_tokenizer": "tokenizer",
            "tokenize": "parts/shard",
            "merge": "tokens",
            "plan": "plan",
            "pretrain": "checkpoint",
            "reshard": "export",
            "evaluate": "evaluation",
            "benchmark": "benchmark",
            "retro_db": "retro-db",
        }.items():
            self._make(zygote, stage, output)
        self._write_embeddings()
        for stage, output in {"faiss_train": "empty-index", "faiss_add": "index"}.items():
            self._make(zygote, stage, output)
        self._make_project(zygote)
        self._make(zygote, "retro_export", "exported")

    def _make(self, zygote: Zygote, stage: str, output: str) -> None:
        arguments = self.arguments(stage, self.at(output))
        status, _, log = zygote.run(f"stages.{stage}", arguments)
        assert status == 0, f"{stage} failed:\n{log}"

    def _write_corpus(self) -> None:
        path = local_path(self.at("corpus.jsonl"))
        assert path is not None
        words = TEXT.split()
        lines = [
            json.dumps({"text": " ".join(words[(i * j) % 13] for j in range(20 + i)), "id": i})
            for i in range(DOCUMENTS)
        ]
        path.write_text("\n".join(lines) + "\n")
        Path(self.at("held.txt")).write_text(" ".join(words * 12) + "\n")
        labels = [{"text": f"{word} yard", "label": int(word < "m")} for word in words]
        Path(self.at("labels.jsonl")).write_text("".join(json.dumps(x) + "\n" for x in labels))
        for name in ("corpus.jsonl", "held.txt", "labels.jsonl"):
            os.utime(self.at(name), (1e9, 1e9))  # settled: their digests are remembered

    def _write_vocabulary(self) -> None:
        """Words of the corpus for BERT."""
        path = Path(self.at("vocab.txt"))
        path.write_text("\n".join([*SPECIAL, *sorted(set(TEXT.split()))]) + "\n")
        os.utime(path, (1e9, 1e9))

    def _write_embeddings(self) -> None:
        """A vector for each chunk of the database, and of the samples of a training."""
        count = len(ChunkDatabase(self.at("retro-db")))
        write_blocks(Path(self.at("embeddings")), clustered(count, 8), 100)
        write_blocks(Path(self.at("embeddings-samples")), clustered(CHUNKS, 8), 40)

    def _make_project(self, zygote: Zygote) -> None:
        """A Retro project of the database, the index, and neighbours of training samples."""
        at = Path(self.at("project"))
        shutil.copytree(self.at("retro-db"), at / "db")
        shutil.copytree(self.at("index"), at / "index")
        options = self._inputs()["faiss_query"]
        words = [*options[: options.index("--data-path")], "--data-path", self.at("tokens")]
        words += ["--output-dir", str(at / "query/train")]
        status, _, log = zygote.run("stages.faiss_query", words)
        assert status == 0, log
        document = {
            "retro_gpt_data_path": [self.at("tokens")],
            "retro_gpt_split": "90,10,0",
            "retro_gpt_train_samples": 24,
            "retro_gpt_eval_interval": 3,
            "retro_gpt_eval_iters": 1,
            "retro_gpt_tokenizer_type": "HuggingFaceTokenizer",
            "retro_gpt_tokenizer_model": self.at("tokenizer"),
            "retro_gpt_seq_length": 32,
            "retro_gpt_global_batch_size": 4,
            "retro_gpt_chunk_length": 8,
            "retro_block_size": 40,
            "retro_bert_tokenizer_type": "BertWordPieceLowerCase",
            "retro_bert_vocab_file": self.at("vocab.txt"),
            "retro_neighbor_dirs": {"train": "train"},
        }
        (at / "config.json").write_text(json.dumps(document))
        for path in at.rglob("*"):
            os.utime(path, (1e9, 1e9))

    def _write_encoder(self) -> None:
        """A small BERT of that vocabulary."""
        words = len(Path(self.at("vocab.txt")).read_text().splitlines())
        make(Path(self.at("bert")), vocab_size=words, vocabulary=self.at("vocab.txt"))
        for path in Path(self.at("bert")).iterdir():
            os.utime(path, (1e9, 1e9))

    def _inputs(self) -> dict[str, list[str]]:
        """By stage: what it reads, and options."""
        corpus, tokens, load = self.at("corpus.jsonl"), self.at("tokens"), self.at("checkpoint")
        model = self.at("tokenizer")
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]
        numbers = ("--seq-length", "--global-batch-size", "--train-iters", "--split")
        numbers += ("--eval-interval", "--eval-iters")
        flags = [*MODEL, *TRAINING]
        indexed = [word for flag in numbers for word in (flag, flags[flags.index(flag) + 1])]
        text, short = ["--valid-data", self.at("held.txt")], ["--num-tokens-to-generate", "8"]
        made = ("plan", "tokenizer", "tokens", "checkpoint", "export", "evaluation", "benchmark")
        data = ["--data-path", "0.4", tokens, "0.6", tokens]
        return {
            "clean": ["--input", corpus, "--rules", "nfc", "min_words:limit=30", "--workers", "1"],
            "decontaminate": [
                *("--input", corpus, "--tasks", "wikitext", "--task-data", self.at("held.txt")),
                *("--key-threshold", "0", "--workers", "1"),
            ],
            "dedup": ["--input", corpus, "--jaccard-threshold", "0.5", "--workers", "1"],
            "datasheet": ["--documents", corpus, "--num-identified", "5"],
            "mix": [
                *("--input", corpus, self.at("held.txt"), "--sources", "corpus", "held"),
                *("--epochs", "1.5", "2", "--shard-size-mb", "0.05", "--workers", "1"),
            ],
            "score": [
                *("--input", corpus, "--classifier", "ngrams", "--keep-fraction", "0.5"),
                *("--classifier-data", self.at("labels.jsonl"), "--workers", "1"),
            ],
            "collect": ["--max-size-mb", "0.2", "--num-shards", "2"],
            "train_tokenizer": ["--input", corpus, "--vocab-size", "300"],
            "tokenize": ["--input", corpus, "--append-eod", *tokenizer],
            "merge": ["--input", self.at("parts")],
            "faiss_add": ["--index", self.at("empty-index"), "--embeddings", self.at("embeddings")],
            "faiss_train": ["--embeddings", self.at("embeddings"), "--retro-index-str", "IVF8,SQ8"],
            "faiss_query": [
                *("--index", self.at("index"), "--embeddings", self.at("embeddings-samples")),
                *("--retro-db", self.at("retro-db"), "--retro-gpt-chunk-length", "8"),
                *("--retro-block-size", "20", "--retro-query-num-neighbors-query", "40"),
                *(*indexed, *data),
            ],
            "index": [*indexed, *data],
            "plan": [*MODEL, "--vocab-size", "300", "--micro-batch-size", "2"],
            "pretrain": [*flags, "--data-path", tokens, *tokenizer],
            "parity": ["--load", load, "--prompts", "the yard", "--device", "cpu"],
            "quantize": ["--load-dir", load, *text],
            "reshard": ["--load-dir", load, "--saver", "hf"],
            "evaluate": [
                *("--load", load, "--task", "WIKITEXT103", "--overlapping-eval", "16"),
                *text,
            ],
            "benchmark": [
                *("--load", load, "--prompts", "the yard", "a train"),
                *short,
                "--num-warmups",
                "0",
            ],
            "generate": [
                *("--load", load, "--prompts", "the yard", "a train", "on the rails"),
                *("--num-tokens-to-generate", "4", "--inference-max-requests", "1"),
                *("--device", "cpu"),
            ],
            "retro_db": [
                *("--data-path", tokens, *tokenizer, "--retro-doc-block-size", "20"),
                *("--retro-bert-tokenizer-type", "BertWordPieceLowerCase"),
                *("--retro-bert-vocab-file", self.at("vocab.txt"), "--retro-index-ntrain", "30"),
                *("--retro-gpt-chunk-length", "8"),
            ],
            "retro_embed": [
                *("--retro-db", self.at("retro-db"), "--data-path", tokens, *tokenizer),
                *("--load", self.at("bert"), "--retro-bert-max-chunk-length", "48"),
                *("--retro-block-size", "25", "--workers", "1", "--device", "cpu"),
            ],
            "retro_export": ["--retro-project-dir", self.at("project"), "--copy-data"],
            "retro_import": ["--retro-project-dir", self.at("exported"), "--copy-data"],
            "report": [word for name in made for word in (f"--{name}", self.at(name))],
        }
