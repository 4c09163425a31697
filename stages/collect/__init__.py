"""Make a corpus of the documentation that comes with the running Python.

Reads: the sources of the standard library and of the installed packages (never importing them).
Writes: train-0000N.jsonl, one document a line with `text`, `src` and `id`, and heldout.txt.
Image: cpu."""
