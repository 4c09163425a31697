"""Mixtures of experts: an MLP of which each token visits a part."""
