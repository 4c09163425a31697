"""Generates texts from a checkpoint, for prompts of the command line or of a file.

Reads: a checkpoint of any kind, a file of prompts. Writes: nothing, or generations.jsonl with
--output-dir. Image: cpu or cuda."""
