"""A checkpoint of ours as a source, for what writes other formats."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.gpt import gpt_config
from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.tensorfile import TensorSpec

KEPT = ("model.", "optimizer.")
"""Begins the names of the tensors that other formats have a place for."""

GENERATION = "generation"
"""Key of a checkpoint's config.json: how text is to be made, as a Hugging Face folder said it."""


class CheckpointSource:
    """One step of ours; closing it closes the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.url = checkpoint.url
        self.config, self.padded_vocab_size = gpt_config(checkpoint)
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
        return self.checkpoint.read(name)

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer that the step carries."""
        url = self.checkpoint.tokenizer_url
        return {name: store.read_bytes(join(url, name)) for name in store.list_files(url)}

    def close(self) -> None:
        """Let the files go."""
        self.checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
