"""What a loop tells after each step, and to whom: console, files, checkpoints."""
