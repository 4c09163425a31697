"""The version of trainyard; pyproject.toml reads it from here."""

VERSION = "0.1.0"
