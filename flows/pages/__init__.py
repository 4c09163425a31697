"""Prefect artifacts of a flow run: tables, progress, charts, lineage."""
