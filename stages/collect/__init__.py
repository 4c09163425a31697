"""Makes a corpus from the documentation in the running Python and its packages.

Reads: the sources of the standard library and of the installed packages (never importing them).
Writes: train-0000N.jsonl, one document a line with `text`, `src` and `id`, and heldout.txt.
Image: cpu."""
