"""The proof that a run lost and repeated no sample, and its certificate."""
