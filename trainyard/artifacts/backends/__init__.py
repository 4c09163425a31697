"""The kinds of store: local files, S3, HTTP, and other fsspec file systems."""
