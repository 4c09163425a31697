"""What a yard keeps of no use: found, told, and removed by policy: `python -m flows.gc`."""
