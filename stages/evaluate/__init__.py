"""Evaluates a checkpoint on a text by a task of trainyard.evaluation.tasks.

Reads: a checkpoint and a text file. Writes: nothing, or results.json with --output-dir.
Image: cpu or cuda."""
