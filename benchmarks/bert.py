"""Training speed of BERT-345M on one GPU: the real stage, data loading and masking included.

    python -m benchmarks.bert [flags of stages.pretrain, such as --attention-dropout 0]

Random words in documents of twenty sentences; medians of the steps after the first ten."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.train import STEPS, WARMUP
from trainyard.corpus.indexed import IndexedWriter

VOCAB_SIZE = 30522
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BATCH = 64
SENTENCES = 20

OPTIONS = {
    "model-type": "bert",
    "num-layers": 24,
    "hidden-size": 1024,
    "num-attention-heads": 16,
    "seq-length": 512,
    "micro-batch-size": BATCH,
    "global-batch-size": BATCH,
    "train-iters": STEPS + WARMUP,
    "eval-iters": 0,
    "lr": 1e-4,
    "log-interval": 10,
    "split": "100,0,0",
    "num-workers": 2,
    "tokenizer-type": "BertWordPieceLowerCase",
}


def write_inputs(folder: Path) -> tuple[Path, Path]:
    """A vocabulary, and the prefix of token files with a document for each sample and one more."""
    vocabulary, prefix = folder / "vocab.txt", folder / "random_text_sentence"
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL)))]
    vocabulary.write_text("\n".join(words) + "\n")
    random = np.random.default_rng(1)
    with prefix.with_suffix(".bin").open("wb") as out, prefix.with_suffix(".idx").open("wb") as idx:
        writer = IndexedWriter(out, np.uint16)
        for _ in range(2 * BATCH * (STEPS + WARMUP)):
            lengths = random.integers(10, 45, SENTENCES)
            ids = [random.integers(len(SPECIAL), VOCAB_SIZE, n).astype(np.uint16) for n in lengths]
            writer.add_document(ids)
        writer.write_index(idx)
    return vocabulary, prefix


def main() -> None:
    """The command line."""
    folder = Path(tempfile.mkdtemp(prefix="trainyard-bert-"))
    vocabulary, prefix = write_inputs(folder)
    options = OPTIONS | {"vocab-file": vocabulary, "data-path": prefix, "save": folder / "run"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "stages.pretrain", *words, "--bf16", "--no-save-optim"]
    done = subprocess.run(
        [*command, "--log-throughput", *sys.argv[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])
    lines = [json.loads(line) for line in (folder / "run/timings.jsonl").read_text().splitlines()]
    steady = [line for line in lines if line["step"] > WARMUP]
    rate = statistics.median(line["tokens_per_second"] for line in steady)
    memory = max(line["memory_bytes"] for line in steady)
    print(f"bert-345m: {rate:,.0f} tok/s, {memory / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
