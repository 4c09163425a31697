"""Stored artifacts: stores, digests, manifests, claims."""
