"""Data parallelism: the same weights on every rank, gradients reduced in flat buckets."""
