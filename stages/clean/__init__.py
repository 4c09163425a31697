"""Clean documents by rules: form, language, length, quality, personal data.

Reads: JSONL, Parquet or plain text, and the files of a tokenizer if a rule counts tokens. Writes:
documents-N.jsonl and dropped-N.jsonl for every unit N of the input, and report.json. Image: cpu."""
