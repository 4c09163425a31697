"""Evaluation protocols, each with the exact definition of its numbers."""
