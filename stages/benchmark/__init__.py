"""Generate from a checkpoint, and measure it: first token, later tokens, tokens/s, memory.

Reads: a checkpoint. Writes: nothing, or with --output-dir generations.json and timings.json
(volatile). Image: cpu or cuda."""
