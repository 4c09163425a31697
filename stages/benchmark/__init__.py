"""Generates from a checkpoint and measures first token, later tokens, tokens/s and memory.

Reads: a checkpoint. Writes: nothing, or with --output-dir generations.json and timings.json
(volatile). Image: cpu or cuda."""
