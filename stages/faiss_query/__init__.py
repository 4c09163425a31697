"""Find the neighbours of the chunks of a training's samples.

Reads: a filled index of faiss_add, embeddings of the chunks, a chunk database, the token files of
the training. Writes: HDF5 blocks of neighbours, and neighbors.json about them. Image: faiss."""
