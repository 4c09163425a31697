"""Turn text into Megatron token files.

Reads: JSONL, Parquet or plain text, and the files of a tokenizer. Writes: PREFIX_KEY_document.bin,
.idx and .docs for every JSON key, the same bytes for any number of workers, ranks and kills. Image:
cpu."""
