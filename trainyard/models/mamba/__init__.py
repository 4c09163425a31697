"""The Mamba family: Mamba-2 layers alone, or mixed with attention and MLPs."""
