"""What a model costs in arithmetic and memory, before anything is built."""
