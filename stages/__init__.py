"""The stages: one package and one container image each. A stage reads and writes artifacts."""
