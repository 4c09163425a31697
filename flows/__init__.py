"""The flows: when and where stages run. The only package that imports Prefect."""

from trainyard.interpreter import check_program

check_program()
