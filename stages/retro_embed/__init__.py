"""Embed the chunks of a Retro database, or of the samples of a training, by the encoder of a BERT.

Reads: a database of retro_db and its token files, or those of a training; their tokenizer; a
checkpoint of a BERT. Writes: blocks of vectors, the same bytes on CPUs for any number of ranks,
shares, workers and kills. Image: cpu or cuda."""
