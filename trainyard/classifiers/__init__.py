"""Scores of texts, such as of toxicity, by classifiers of our own and of other packages."""
