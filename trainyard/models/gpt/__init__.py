"""The GPT family: options, module, FLOPs, memory, names in foreign checkpoints."""
