"""The training loop: a step, its ledger, its checks, and what they are built of."""
