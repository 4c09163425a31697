"""One command a figure, each beside its peer's where the peer can run."""
