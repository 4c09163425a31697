"""Shows the content of a checkpoint, or the differences between two.

Reads: checkpoints. Writes: nothing. Image: torch."""
