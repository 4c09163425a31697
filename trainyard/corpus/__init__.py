"""Token files and the documents they are made of: numpy only, no tokenizer, no torch."""
