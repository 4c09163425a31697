"""How the work of one model is cut over processes, and how they talk."""
