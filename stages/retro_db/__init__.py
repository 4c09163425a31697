"""Cut a corpus into the chunks of a Retro database.

Reads: token files of a blend, the files of their tokenizer, a BERT vocabulary. Writes: HDF5 blocks
of every dataset, merged databases for sampling, training and validation, and
indexed_dataset_infos.json, the same bytes for any number of workers and kills. Image: cpu."""
