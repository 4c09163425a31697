"""A trainyard checkpoint as a source, for writers of other formats.

trainyard never scores the rows that pad its vocabulary, so they keep their initial values. Other
programs do score them, and a padding logit may exceed those of tokens, since a softmax ignores a
common offset. So padding rows are written as the mean of the tokens' rows. Their logit is the mean
of the tokens' logits, and by Jensen's inequality p rows of padding next to V tokens get at most
p / (V + p) of the probability, for any hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.vocabulary import REPEATED, has_rows

KEPT = ("model.", "optimizer.")
"""Prefixes of the tensors that other formats can hold."""

GENERATION = "generation"
"""Key of a checkpoint's config.json: the generation settings of a Hugging Face folder."""


class CheckpointSource(Closing):
    """One trainyard step; `close` closes the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.url = checkpoint.url
        config, self.padded_vocab_size = model_config(checkpoint)
        self.config = config
        document, state = checkpoint.config, checkpoint.state
        self.vocab_size = int(document.get("vocab_size", self.padded_vocab_size))
        self.generation: Mapping[str, Any] = document.get(GENERATION, {})
        self.args: Mapping[str, Any] = document.get("run") or {}
        self.step = checkpoint.step
        self.consumed_train_samples = int(state.get("consumed_train_samples", 0))
        self.num_updates = int(state.get("num_updates", 0))
        self.specs: Mapping[str, TensorSpec] = {
            name: checkpoint.spec(name) for prefix in KEPT for name in checkpoint.names(prefix)
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        tensor = self.checkpoint.read(name)
        is_trained_here = bool(self.checkpoint.config.get("run"))
        if is_trained_here and has_rows(name) and name.startswith(REPEATED):
            tokens = tensor[: self.vocab_size]
            tensor[self.vocab_size :] = tokens.mean(dim=0, dtype=torch.float32)
        return tensor

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer that the step carries."""
        return self.checkpoint.tokenizer_files()

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()
