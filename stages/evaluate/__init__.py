"""Measure how good a checkpoint is by a protocol of the table of tasks.

Reads: a checkpoint and a text file. Writes: nothing, or results.json with --output-dir.
Image: cpu or cuda."""
