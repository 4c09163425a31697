"""Which documents, and which lines of documents, repeat others. Knows no stage."""
