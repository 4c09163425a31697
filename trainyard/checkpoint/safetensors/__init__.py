"""Safetensors files: headers that are not trusted, ranged reads, streaming writes."""
