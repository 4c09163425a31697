"""A stage as a container of a Docker engine."""
