"""Embeds the texts of `benchmarks.embedding` with another program; run by its interpreter.

    PEER/bin/python benchmarks/embedding_peer.py FOLDER TEXTS VECTORS THREADS

FOLDER has a BERT and its tokenizer, TEXTS is a JSON list. Prints the peer's name: sentence-
transformers, or where that is not installed transformers in its way (texts sorted by length, padded
to the longest of a batch, pooled with a mask). Then, for each batch size on a line of its input, it
embeds all texts, saves them as VECTORS and prints the seconds of wall and of CPU time that this
took. It imports nothing of trainyard."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH = 256
"""Most tokens of a text."""

Encode = Callable[[list[str], int], Any]


def by_sentence_transformers(folder: str) -> Encode:
    """As its users call it; of a folder that names no layers it takes the mean of all tokens."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    sentences = SentenceTransformer(folder, device="cpu")
    sentences.max_seq_length = LENGTH
    return lambda texts, batch: sentences.encode(
        texts, batch_size=batch, normalize_embeddings=True, show_progress_bar=False
    )


def by_transformers(folder: str) -> Encode:
    """What sentence-transformers does, with transformers alone."""
    import transformers

    transformers.logging.disable_progress_bar()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()

    def encode(texts: list[str], batch: int) -> Any:
        order = np.argsort([-len(text) for text in texts])
        found = np.empty((len(texts), model.config.hidden_size), np.float32)
        for first in range(0, len(texts), batch):
            some = order[first : first + batch]
            tokens = words(
                [texts[number] for number in some],
                padding=True,
                truncation=True,
                max_length=LENGTH,
                return_tensors="pt",
            )
            with torch.inference_mode():
                hidden = model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).float()
            means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            found[some] = torch.nn.functional.normalize(means, dim=1).numpy()
        return found

    return encode


def main() -> None:
    """The command line."""
    folder, texts, vectors, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    whole = importlib.util.find_spec("sentence_transformers") is not None
    encode = by_sentence_transformers(folder) if whole else by_transformers(folder)
    print("sentence-transformers" if whole else "transformers", flush=True)
    given = json.loads(Path(texts).read_text())
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        found = encode(given, int(line))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        np.save(vectors, found)
        print(json.dumps([wall, cpu]), flush=True)


if __name__ == "__main__":
    main()
