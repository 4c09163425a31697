"""Evaluation sets as n-grams, and the parts of documents that contain them. Knows no stage."""
