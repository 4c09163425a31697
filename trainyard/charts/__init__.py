"""Charts as SVG, and numbers as text: for the run card, Prefect's pages and the plan."""
