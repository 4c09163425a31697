"""Input files of every format, cut into byte ranges and read as rows of text."""
