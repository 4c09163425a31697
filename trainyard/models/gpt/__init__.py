"""The GPT family: options, module, samples, names in foreign checkpoints."""
