"""The Prefect servers that we start, and what they need from us."""
