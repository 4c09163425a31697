"""Converts a checkpoint between formats, or copies a step into another number of files.

Reads: a run folder or a step folder of `pretrain`, or another program's checkpoint. Writes: a
folder with one step in our format, or another program's files. Image: cpu."""
