"""Trains a byte-level BPE tokenizer.

Reads: JSONL or plain text. Writes: tokenizer.json and tokenizer_config.json, a folder that
`--tokenizer-model` and transformers take. Image: cpu."""
