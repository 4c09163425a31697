"""Serves text generation from a checkpoint over HTTP, until it is stopped.

Reads: a checkpoint of any kind. Writes: nothing. Image: cpu or cuda."""
