"""Fill a trained index with embeddings, and measure its recall.

Reads: an index of faiss_train, a folder of embedding blocks. Writes: `added.faissindex` and
`index.json`. Image: faiss."""
