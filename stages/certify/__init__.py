"""Proves that a training run lost and repeated no sample, or names the first broken link.

Reads: a run folder, and its token files if available. Writes: nothing, or with --output the
certificate. Image: cpu."""
