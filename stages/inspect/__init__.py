"""What is in a checkpoint, or what differs between two.

Reads: checkpoints. Writes: nothing. Image: torch."""
