"""Conversations to tokens, and to the targets that say which of them are learnt."""
