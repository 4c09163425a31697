"""The run card: one HTML page that shows a run, from its artifacts.

Reads: a checkpoint and, where given, plan, corpus, tokenizer, tokens, export, evaluation and
benchmark. Writes: PREFIX.html (volatile) and PREFIX.summary.json. Image: cpu."""
