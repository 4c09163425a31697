"""Train an empty index on embeddings.

Reads: a folder of embedding blocks. Writes: `empty.faissindex` and `index.json`. Image: faiss."""
