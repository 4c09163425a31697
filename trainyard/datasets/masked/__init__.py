"""Samples of BERT and T5: spans of sentences, some tokens masked."""
