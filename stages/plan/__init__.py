"""Computes parameters, FLOPs and memory of a model before it is built.

Reads: nothing, or a tokenizer's files to count its tokens; with --retro or --corpus, manifests of
small runs. Writes: nothing, or plan.json (and schedule.svg) with --output-dir, retro_plan.json with
--retro, corpus_plan.json with --corpus. Image: cpu."""
