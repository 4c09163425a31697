"""Computes parameters, FLOPs and memory of a model before it is built.

Reads: nothing, or a tokenizer's files to count its tokens. Writes: nothing, or plan.json (and
schedule.svg) with --output-dir. Image: cpu."""
