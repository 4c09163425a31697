"""Data sets of texts with a class each, in their published layouts: RACE, MNLI, QQP."""
