"""The options of a training, under Megatron-LM's names. Standard library only."""
