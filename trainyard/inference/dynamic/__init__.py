"""Continuous batching over a paged cache: `build` makes the engine, `engine` runs it."""
