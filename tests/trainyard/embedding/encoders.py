"""Small random BERTs of `transformers` as folders, and plain loops that embed texts by them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.trainyard.retrieval.corpora import write_vocabulary
from trainyard.embedding.config import EmbeddingConfig
from trainyard.embedding.embedder import BertEmbedder
from trainyard.embedding.encoder import Encoder, load_encoder
from trainyard.embedding.word_pieces import find_tokenizer

CPU = torch.device("cpu")

TEXTS = [
    "the yard shunts every train",
    "a",
    "",
    "of words, onto the right track before dawn",
    "the night train leaves",
    "dawn",
    "x" * 300,
    "the yard shunts every train",
    "b",
]

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


def make(
    folder: Path,
    kind: str = "BertModel",
    seed: int = 1,
    vocabulary: str | None = None,
    **changed: Any,
) -> Any:
    """Save a random model with a vocab.txt, of letters unless one is given; returns it, ready to
    compute."""
    import transformers

    made = getattr(transformers, kind)
    config = made.config_class(**{**SMALL, **changed})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = made(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    if vocabulary is None:
        write_vocabulary(folder)
    else:
        shutil.copy(vocabulary, folder / "vocab.txt")
    return model


def encoder_of(model: Any) -> Any:
    """The part of a model of transformers that has no head."""
    return getattr(model, "bert", model)


def embedder(folder: Path, workers: int = 1, **options: Any) -> BertEmbedder:
    """Ours, on the CPU."""
    config = EmbeddingConfig(**{"retro_bert_max_chunk_length": 48, **options})
    encoder = load_encoder(str(folder), CPU, config)
    return BertEmbedder(encoder, find_tokenizer(encoder, None, folder), config, workers)


def embed(mine: BertEmbedder, texts: Sequence[str]) -> NDArray[np.float32]:
    """(texts, dimensions)"""
    return mine.embed(mine.prepare(texts)[0])


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda hidden: hidden[1:-1].mean(dim=0),
    "mean-all": lambda hidden: hidden.mean(dim=0),
    "cls": lambda hidden: hidden[0],
}


def reference(
    model: Any, encoder: Encoder, folder: Path, texts: Sequence[str], pooling: str = "mean"
) -> NDArray[np.float32]:
    """Vectors by a plain loop: one text at a time, without padding."""
    tokenizer = find_tokenizer(encoder, None, folder)
    rows = []
    for text in texts:
        ids = tokenizer.encode(text)[:46] or [tokenizer.pad_id]
        tokens = torch.tensor([[tokenizer.cls, *ids, tokenizer.sep]])
        with torch.no_grad():
            hidden = encoder_of(model)(input_ids=tokens).last_hidden_state[0]
        rows.append(POOLINGS[pooling](hidden).float().numpy())
    return np.stack(rows)
