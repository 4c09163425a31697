"""Artifacts at rest: stores, digests, manifests, claims."""
