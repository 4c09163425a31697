"""Samples for training, as numpy views over token files; `loader` alone imports torch."""
