"""What kind of checkpoint lies at a URL, from the names of its files alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from trainyard.artifacts import store
from trainyard.checkpoint.steps import INDEX, step_of

Kind = Literal["trainyard", "hf", "meta", "megatron", "torch_dist"]

MEGATRON = re.compile(r"(.+/)?mp_rank_\d+(_\d+)*/(model_optim_rng|model_rng|distrib_optim)\.pt")
"""Megatron-LM's `torch` format: core and legacy models alike."""

TORCH_DIST = re.compile(r"(.+/)?(__\d+_\d+\.distcp|common\.pt|\.metadata)")

META = re.compile(r"consolidated\.\d+\.pth")

HUGGINGFACE = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*\.bin.*"
)

BESIDE_WEIGHTS = {"generation_config.json", "tokenizer_config.json", "tokenizer.json"}


def detect(url: str) -> Kind | None:
    """The kind of what lies there: a step, the root of a run, a folder of weights. None: nothing
    that looks like a checkpoint."""
    return kind_of_names(store.list_files(url))


def kind_of_names(names: Iterable[str]) -> Kind | None:
    """The kind that relative names tell; where there are several, ours, and then the outermost."""
    return next(iter(kinds_of_names(names)), None)


def kinds_of_names(names: Iterable[str]) -> list[Kind]:
    """All kinds that relative names tell, the one that is meant first."""
    found = list(names)
    top = {name for name in found if "/" not in name}
    told: dict[Kind, bool] = {
        "trainyard": any(_is_ours(name) for name in found),
        "hf": "config.json" in top and any(HUGGINGFACE.fullmatch(name) for name in top),
        "meta": "params.json" in top and any(META.fullmatch(name) for name in top),
        "megatron": any(MEGATRON.fullmatch(name) for name in found),
        "torch_dist": any(TORCH_DIST.fullmatch(name) for name in found),
    }
    kinds = [kind for kind, is_told in told.items() if is_told]
    if not kinds and "config.json" in top and top & BESIDE_WEIGHTS:
        return ["hf"]  # a download without its weights, of which the reader says more
    return kinds


def _is_ours(name: str) -> bool:
    """A file of a step of ours, in a run folder or in the step itself; finished or not."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return file == INDEX
    return step_of(folder) is not None and (file == INDEX or file.endswith(".safetensors"))
