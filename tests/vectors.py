"""Vectors made by running Megatron-LM; what we make must equal them."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
