"""Retrieval databases: a corpus cut into chunks, and the search for neighbours of a chunk."""
