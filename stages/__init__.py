"""The stages: one package and one container image each. A stage reads and writes artifacts."""

from trainyard.interpreter import check_program

check_program()
