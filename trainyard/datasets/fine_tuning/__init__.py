"""Samples of conversations, for supervised fine-tuning."""
