"""Inner loops of other programs for the rows of `benchmarks.collect`; run by their interpreter.

    PEER/bin/python benchmarks/collect_peers.py NAME FILE...

Prints facts, and last the processor seconds of the loop, without imports and construction. It
imports datatrove[processing], datasketch and orjson, and nothing of trainyard."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson


def texts(path: str) -> Iterator[str]:
    """The texts of a JSONL file."""
    with open(path, "rb") as file:
        for line in file:
            yield orjson.loads(line)["text"]


def read(path: str) -> tuple[int, float]:
    """Read the corpus with orjson."""
    began = time.process_time()
    chars = sum(map(len, texts(path)))
    return chars, time.process_time() - began


def fineweb(path: str) -> tuple[int, float]:
    """datatrove's filters of FineWeb but for the language; documents kept."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters: list[Any] = [
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
    ]
    for one in filters:  # builds its word tokenizer
        one.filter(Document(text="One sentence. And another one.", id="0"))
    began = time.process_time()
    kept = 0
    for number, text in enumerate(texts(path)):
        document = Document(text=text, id=str(number))
        kept += all(one.filter(document) is True for one in filters)
    return kept, time.process_time() - began


def datasketch(path: str) -> tuple[int, float]:
    """MinHash and LSH of words in fives, 200 permutations in 25 bands; candidate pairs."""
    import re

    from datasketch import MinHash, MinHashLSH

    word = re.compile(r"\w+")
    index = MinHashLSH(num_perm=200, params=(25, 8))
    began = time.process_time()
    pairs = 0
    for number, text in enumerate(texts(path)):
        words = word.findall(text.lower())
        minhash = MinHash(num_perm=200)
        shingles = {" ".join(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}
        minhash.update_batch([one.encode() for one in shingles])
        pairs += len(index.query(minhash))
        index.insert(number, minhash)
    return pairs, time.process_time() - began


LOOPS: dict[str, Callable[[str], tuple[int, float]]] = {
    "read": read,
    "fineweb": fineweb,
    "datasketch": datasketch,
}

if __name__ == "__main__":
    found, seconds = LOOPS[sys.argv[1]](sys.argv[2])
    print(found, seconds)
