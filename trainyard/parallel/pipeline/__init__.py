"""The layers of a model over several ranks, and micro-batches through them."""
