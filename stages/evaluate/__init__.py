"""Evaluates a checkpoint on data sets by a task of trainyard.evaluation.tasks, on any number of
ranks.

Reads: a checkpoint and data sets. Writes: nothing, or results.json with passports and the scores of
all examples with --output-dir. Image: cpu or cuda."""
