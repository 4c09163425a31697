"""Sources of documents: dumps, crawls and pages; each finds records in a range of a file."""
