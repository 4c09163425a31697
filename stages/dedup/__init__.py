"""Remove documents, and lines, that repeat others: exactly or nearly.

Reads: JSONL, Parquet or plain text. Writes: documents-N.jsonl and dropped-N.jsonl for every unit N
of the input, clusters.jsonl with the documents that one stands for, and report.json. Image: cpu."""
