"""Megatron-LM's command line and YAML files, understood: what users bring along. Standard library
only."""
