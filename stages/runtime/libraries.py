"""Versions of the libraries that shape results, for manifests."""

from __future__ import annotations

import sys
from importlib import metadata

SHAPING = ("gigatoken", "h5py", "nltk", "numpy", "sentencepiece", "tiktoken", "tokenizers", "torch")


def loaded_libraries() -> dict[str, str]:
    """Name and version of those that this process has loaded."""
    loaded = {name: sys.modules[name] for name in SHAPING if name in sys.modules}
    return {
        name: str(getattr(module, "__version__", "") or metadata.version(name))
        for name, module in loaded.items()
    }
