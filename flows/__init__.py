"""The flows: when and where stages run. The only package that imports Prefect."""
