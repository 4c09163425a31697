"""Trains a GPT on token files.

Reads: token file pairs (merge, tokenize), a tokenizer (train_tokenizer), optionally a checkpoint
(--load). Writes: a run folder with steps iter_0000100/, ledger.jsonl, manifest.json, and (volatile)
timings.jsonl, saves.jsonl, attempts.json. Image: cuda or cpu."""
