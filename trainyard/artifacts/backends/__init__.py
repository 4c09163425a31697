"""The kinds of store: local files, S3, HTTP, and whatever fsspec knows."""
