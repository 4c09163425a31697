"""Shared by all stages: command line, run context, up-to-date check, ranks and exit."""
