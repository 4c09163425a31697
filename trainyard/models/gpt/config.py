"""Options of a GPT. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.models.config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A decoder-only transformer: GPT-2 and GPT-3, Llama, Mistral, Qwen and similar models."""
