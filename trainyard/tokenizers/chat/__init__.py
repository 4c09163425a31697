"""Tokenizers of conversations: tokens, and targets that mask what is not learnt."""
