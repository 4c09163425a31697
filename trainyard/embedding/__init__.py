"""Embeddings of texts by the encoder of a BERT, or by a function of another package."""
