"""Turns a recipe into the jobs of a flow, validated before any work. No Prefect here."""
