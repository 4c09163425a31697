"""What the figures are compared with: the reference libraries, alone, as one would use them.

    python -m benchmarks.peers NAME FILE ARGUMENT...

Each prints one number, the seconds of its inner loop: importing, building the tokenizer and reading
the file are left out, which favours the peer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

BATCH = 1000
BYTES = 1 << 20
"""What a thread reads at once."""


def _batches(file: str) -> Iterator[list[str]]:
    with open(file, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for start in range(0, len(texts), BATCH):
        yield texts[start : start + BATCH]


def _loop(file: str, encode: Callable[[list[str]], Any]) -> float:
    batches = list(_batches(file))
    began = time.perf_counter()
    for batch in batches:
        encode(batch)
    return time.perf_counter() - began


def huggingface_gpt2(file: str, vocab: str, merges: str) -> float:
    """`encode_batch` of Hugging Face tokenizers, on as many threads as RAYON_NUM_THREADS says."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(vocab, merges)
    return _loop(file, lambda batch: [e.ids for e in tokenizer.encode_batch(batch)])


def huggingface_bert(file: str, vocab: str) -> float:
    """The same with BERT's uncased WordPiece."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(vocab, lowercase=True)
    return _loop(
        file, lambda b: [e.ids for e in tokenizer.encode_batch(b, add_special_tokens=False)]
    )


def huggingface_bert_chunks(file: str, vocab: str) -> float:
    """`encode_batch_fast` of BERT's uncased WordPiece, whose results nobody reads."""
    from tokenizers import BertWordPieceTokenizer

    encode = BertWordPieceTokenizer(vocab, lowercase=True)._tokenizer.encode_batch_fast
    return _loop(file, lambda batch: encode(batch, add_special_tokens=False))


def sentencepiece(file: str, model: str) -> float:
    """The sentencepiece library on one thread."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=model)
    return _loop(file, lambda batch: [processor.encode(text) for text in batch])


def gigatoken_files(file: str, tokenizer_json: str) -> float:
    """gigatoken's own `encode_files`, in this fresh process, on all cores."""
    import gigatoken

    with open(tokenizer_json, "rb") as source:
        tokenizer = gigatoken.Tokenizer.from_json(source.read())
    began = time.perf_counter()
    tokenizer.encode_files(gigatoken.JsonlFileSource([file]), parallel=True)
    return time.perf_counter() - began


def bare_gpt2(file: str, tokenizer_json: str) -> float:
    """The least that uses the same libraries: orjson, gigatoken and numpy on two threads, tokens to
    a file beside the tokenizer's, without checks, digests or an index. The whole is timed, from the
    first import on."""
    began = time.perf_counter()
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    import gigatoken
    import numpy as np
    import orjson

    tokenizer, out = Path(tokenizer_json).read_bytes(), Path(tokenizer_json).with_suffix(".bin")
    end_of_text = np.array([50256], np.uint16)
    size = Path(file).stat().st_size

    def encode(begin: int, end: int, to: Path) -> None:
        encoder = gigatoken.Tokenizer.from_json(tokenizer)
        with open(file, "rb") as source, to.open("wb") as tokens:
            source.seek(max(begin - 1, 0))
            if begin:
                source.readline()
            while (left := end - source.tell()) > 0:
                lines = source.readlines(min(BYTES, left))
                rows = [encoder.encode(orjson.loads(line)["text"]) for line in lines]
                parts = [part for row in rows for part in (row.astype(np.uint16), end_of_text)]
                tokens.write(np.concatenate(parts).data)

    with ThreadPoolExecutor(2) as threads:
        halves = ((0, size // 2), (size // 2, size))
        list(threads.map(lambda n: encode(*halves[n], out.with_suffix(f".{n}")), range(2)))
    return time.perf_counter() - began


PEERS: dict[str, Callable[..., float]] = {
    "huggingface_gpt2": huggingface_gpt2,
    "huggingface_bert": huggingface_bert,
    "huggingface_bert_chunks": huggingface_bert_chunks,
    "sentencepiece": sentencepiece,
    "gigatoken_files": gigatoken_files,
    "bare_gpt2": bare_gpt2,
}


if __name__ == "__main__":
    print(PEERS[sys.argv[1]](*sys.argv[2:]))
