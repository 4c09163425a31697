"""The origin of every document: PREFIX.docs, beside the token files."""
