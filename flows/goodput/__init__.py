"""Where the time of a run went, over all attempts at it."""
