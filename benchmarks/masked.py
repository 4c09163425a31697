"""Training speed of BERT-345M or T5-220M on one GPU: the real stage, data loading and masking
included.

    python -m benchmarks.masked bert [flags of stages.pretrain, such as --attention-dropout 0]
    python -m benchmarks.masked t5

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

MODELS: dict[str, dict[str, object]] = {
    "bert": {"num-layers": 24, "hidden-size": 1024, "num-attention-heads": 16},
    "t5": {
        "num-layers": 12,
        "decoder-num-layers": 12,
        "decoder-seq-length": 128,
        "hidden-size": 768,
        "num-attention-heads": 12,
        "vocab-extra-ids": 100,
    },
}
OPTIONS = {
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
    if len(sys.argv) < 2 or sys.argv[1] not in MODELS:
        raise SystemExit(f"usage: python -m benchmarks.masked {'|'.join(MODELS)} [flags]")
    name = sys.argv[1]
    folder = Path(tempfile.mkdtemp(prefix="trainyard-masked-"))
    vocabulary, prefix = write_inputs(folder)
    files = {"vocab-file": vocabulary, "data-path": prefix, "save": folder / "run"}
    options = OPTIONS | MODELS[name] | {"model-type": name} | files
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "stages.pretrain", *words, "--bf16", "--no-save-optim"]
    done = subprocess.run(
        [*command, "--log-throughput", *sys.argv[2:]],
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
    mfu = [line["mfu"] for line in steady if line.get("mfu")]
    share = f", {statistics.median(mfu):.1%} MFU" if mfu else ""
    print(f"{name}: {rate:,.0f} tok/s{share}, {memory / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
