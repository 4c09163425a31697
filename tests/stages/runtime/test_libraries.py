"""The libraries that shape results are named, those without a __version__ too."""

from __future__ import annotations

import importlib
from importlib import metadata

import pytest

from stages.runtime.libraries import SHAPING, loaded_libraries


@pytest.mark.parametrize("name", [name for name in SHAPING if name != "torch"])
def test_a_loaded_library_is_named_with_its_version(name: str) -> None:
    importlib.import_module(name)
    assert loaded_libraries()[name] == metadata.version(name)
