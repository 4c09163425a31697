"""The BERT family: options, module, samples, FLOPs, names in foreign checkpoints."""
