"""A small model for benchmarks of a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.inference import SHAPES, their_model

SHAPE = "quick start"
END = "<|endoftext|>"
DOCS = Path(__file__).parents[1] / "docs"


@contextmanager
def model_folder(load: str | None) -> Iterator[str]:
    """A checkpoint, or a folder with the quick start's shape, random weights, and a byte-level BPE
    of as many tokens that was trained on the documentation, so that outputs are texts."""
    if load is not None:
        yield load
        return
    with TemporaryDirectory() as folder:
        their_model(SHAPES[SHAPE], Path(folder))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SHAPES[SHAPE]["vocab_size"],
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train(sorted(map(str, DOCS.glob("*.md"))), trainer)
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(kind))
        yield folder
