"""Finds the documents and sources of a step of a run, and the steps that served a source.

Reads: token files, their sidecars (.docs), optionally a run. Writes: nothing. Image: cpu."""
