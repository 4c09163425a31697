"""The Retro family: options, module, samples, costs, names in foreign checkpoints."""
