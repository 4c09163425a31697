"""Translates Megatron-LM's command lines and YAML files into our options. Standard library only."""
