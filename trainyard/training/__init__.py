"""The training loop and what surrounds it: steps, evaluation, ledger, checkpoints, resumption."""
