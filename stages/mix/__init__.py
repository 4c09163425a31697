"""Mix documents of several sources: a share of each, shuffled, in shards.

Reads: JSONL, Parquet or plain text, and the files of a tokenizer if sizes are counted in tokens.
Writes: documents-N.jsonl for every shard N, and report.json with the size of each source before and
after. Image: cpu."""
