"""A read-only web server for the files of a yard to which pages link."""
