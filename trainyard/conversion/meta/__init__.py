"""Reads and writes Llama and Mistral in the layout of their publishers."""
