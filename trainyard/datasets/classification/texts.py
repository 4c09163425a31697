"""Texts of the data sets, cleaned as Megatron-LM's tasks clean them. Pure functions of a string."""

from __future__ import annotations


def clean_text(text: str) -> str:
    """The text on one line, with single spaces, and none before the end of a sentence."""
    text = " ".join(text.split()) if text.strip() else ""
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text
