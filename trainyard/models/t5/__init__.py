"""The T5 family: options, module, samples, FLOPs, names in foreign checkpoints."""
