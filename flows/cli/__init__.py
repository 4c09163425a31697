"""The command lines of the flows."""
