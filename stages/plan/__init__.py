"""Parameters, arithmetic and memory of a model before it is built.

Reads: nothing. Writes: nothing, or plan.json with --output-dir. Image: cpu."""
