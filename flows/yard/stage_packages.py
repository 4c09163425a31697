"""Packages that only some stages need, where stages are processes of this Python: in a container
they are in the image of the stage. No Prefect here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

HDF5, SEARCH = "h5py", "faiss"

MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("retro_db", "retro_embed", "retro_explore"), (HDF5,)),
    **dict.fromkeys(
        ("faiss_train", "faiss_add", "faiss_query", "retro_preprocess"), (HDF5, SEARCH)
    ),
}
"""Stages of Retro, and the modules that no other stage needs."""


def needs_of(stage: str, options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Modules of a stage with these options: the training of a Retro reads HDF5 too."""
    if stage == "pretrain" and (options or {}).get("model_type") == "retro":
        return (HDF5,)
    return MODULES.get(stage, ())


def missing(modules: Iterable[str]) -> list[str]:
    """Those that this Python cannot find, each once."""
    wanted = dict.fromkeys(modules)
    return [module for module in wanted if importlib.util.find_spec(module) is None]


def how_to_install(modules: Iterable[str]) -> str:
    """The command, from the sources of trainyard."""
    extra = "faiss" if SEARCH in modules else "retro-db"
    return f"run `make install`, or `pip install '.[{extra}]'` in the folder of the sources"
