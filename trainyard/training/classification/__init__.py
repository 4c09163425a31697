"""Fine-tuning of a BERT on RACE, MNLI and QQP: a training with another head and other data."""
