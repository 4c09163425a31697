"""Tensor and sequence parallelism: matrices and vocabulary cut over ranks."""
