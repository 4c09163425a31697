"""Text to token ids and back, each type under Megatron's name for it."""
