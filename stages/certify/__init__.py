"""Prove that a training run lost and repeated nothing, or name the first broken link.

Reads: a run folder, its token files where they are at hand. Writes: nothing, or with --output the
certificate. Image: cpu."""
