"""Scores documents by a classifier, such as for toxicity, and keeps those with the lowest scores.

Reads: JSONL, Parquet or plain text. Writes: documents-N.jsonl and dropped-N.jsonl for every unit N
of the input, each document with its score, and report.json. Image: cpu."""
