"""A checkpoint in another number of files, or as a Hugging Face folder.

Reads: a run folder or a step folder of `pretrain`. Writes: a folder with one step in our format, or
the files that `transformers` loads. Image: cpu."""
