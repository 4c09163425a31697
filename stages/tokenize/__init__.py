"""Turn text into Megatron token files.

Reads: JSONL or plain text, and the files of a tokenizer. Writes: PREFIX_KEY_document.bin and .idx
for every JSON key, the same bytes for any number of workers. Image: cpu."""
