"""How parameters are updated: groups, AdamW, clipping, and the schedules of its two rates."""
