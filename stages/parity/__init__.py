"""Compares the log-probabilities of a training's forward with those of the engines that generate.

Reads: a checkpoint of any kind. Writes: nothing, or parity.json with --output-dir. Image: cpu or
cuda."""
