"""Remove what evaluation sets contain from documents: n-grams in common, and the text around them.

Reads: JSONL, Parquet or plain text, and evaluation sets. Writes: documents-N.jsonl and
dropped-N.jsonl for every unit N of the input, and report.json. Image: cpu."""
