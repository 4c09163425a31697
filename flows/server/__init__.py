"""The Prefect servers that trainyard starts, with their settings, guard and passwords."""
