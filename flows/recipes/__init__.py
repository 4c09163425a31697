"""A recipe in, the jobs of a flow out, validated before any work. No Prefect here."""
