"""Where a stage runs: what is to be started, the block that starts it, and what its end means."""
