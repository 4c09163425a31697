"""Detects the kind of checkpoint at a URL, and its loader, from file names only, without torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Literal

from trainyard.artifacts import store
from trainyard.artifacts.strict_json import shown
from trainyard.checkpoint.steps import INDEX, step_of
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

Kind = Literal["trainyard", "hf", "meta", "megatron", "torch_dist"]

MEGATRON = re.compile(r"(.+/)?mp_rank_\d+(_\d+)*/(model_optim_rng|model_rng|distrib_optim)\.pt")
"""Megatron-LM's `torch` format: core and legacy models alike."""

TORCH_DIST = re.compile(r"(.+/)?(__\d+_\d+\.distcp|common\.pt|\.metadata)")

META = re.compile(r"consolidated\.\d+\.pth")

HUGGINGFACE = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*\.bin.*"
)

BESIDE_WEIGHTS = {"generation_config.json", "tokenizer_config.json", "tokenizer.json"}
"""Files of a Hugging Face folder that are not weights."""


def detect(url: str) -> Kind | None:
    """The kind of checkpoint at a URL: a step, a run folder, or a folder of weights. None for
    anything else."""
    return kind_of_names(store.list_files(url))


def kind_of_names(names: Iterable[str]) -> Kind | None:
    """The kind of checkpoint with these relative names: trainyard's first, then the outermost."""
    return next(iter(kinds_of_names(names)), None)


def kinds_of_names(names: Iterable[str]) -> list[Kind]:
    """All kinds of checkpoint with these relative names, the preferred one first."""
    found = list(names)
    top = {name for name in found if "/" not in name}
    matches: dict[Kind, bool] = {
        "trainyard": any(_is_ours(name) for name in found),
        "hf": "config.json" in top and any(HUGGINGFACE.fullmatch(name) for name in top),
        "meta": "params.json" in top and any(META.fullmatch(name) for name in top),
        "megatron": any(MEGATRON.fullmatch(name) for name in found),
        "torch_dist": any(TORCH_DIST.fullmatch(name) for name in found),
    }
    kinds = [kind for kind, is_match in matches.items() if is_match]
    if not kinds and "config.json" in top and top & BESIDE_WEIGHTS:
        return ["hf"]  # a download without weights; the reader explains what is missing
    return kinds


def _is_ours(name: str) -> bool:
    """A file of a trainyard step, in a run folder or in the step itself; finished or not."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return file == INDEX
    return step_of(folder) is not None and (file == INDEX or file.endswith(".safetensors"))


# --- loaders -------------------------------------------------------------------------------------

OF_KIND: dict[Kind, str] = {
    "trainyard": "trainyard",
    "hf": "hf",
    "meta": "llama_mistral",
    "megatron": "core",
    "torch_dist": "torch_dist",
}
"""The loader for what `detect` finds."""

FITS: dict[str, tuple[Kind, ...]] = {
    "hf": ("hf",),
    "llama_mistral": ("meta", "hf"),
    "mixtral_hf": ("hf",),
    "core": ("megatron",),
    "legacy": ("megatron",),
    "torch_dist": ("torch_dist",),
}
"""Kinds that each loader reads; trainyard's own loader reports what it found itself."""

DESCRIBED_IN = {"config.json", "params.json"}
"""A folder with one of these but no weights goes to its reader, which names the missing files."""

LABELS: dict[Kind, str] = {
    "trainyard": "a checkpoint of trainyard",
    "hf": "a Hugging Face folder",
    "meta": "Meta's files",
    "megatron": "Megatron-LM's torch format",
    "torch_dist": "Megatron-LM's torch_dist format",
}


def loader_for(url: str, asked: str = "auto") -> str:
    """The requested loader, or for `auto` the one of the detected kind.

    A folder without a checkpoint goes to trainyard's loader, which reports what it found."""
    if asked != "auto":
        return asked
    kind = detect(url)
    found = "trainyard" if kind is None else OF_KIND[kind]
    log.info("--loader auto: reading %s with %s", url, found)
    return found


def refuse_unfit(url: str, loader: str) -> None:
    """Raise ConfigError, which names the kind found, if a loader cannot read it.

    From a folder with several kinds, each loader reads its own."""
    wanted = FITS.get(loader)
    if wanted is None:
        return
    names = store.list_files(url)
    kinds = kinds_of_names(names)
    if set(kinds) & set(wanted) or (not kinds and DESCRIBED_IN & names.keys()):
        return
    reads = f"--loader {loader} reads {' or '.join(LABELS[kind] for kind in wanted)}"
    if kinds:
        raise ConfigError(
            f"{url}: {reads}, but this is {LABELS[kinds[0]]}; give --loader "
            f"{OF_KIND[kinds[0]]}, or auto"
        )
    found = "only " + ", ".join(shown(name) for name in list(names)[:5]) if names else "no file"
    raise ConfigError(f"{url}: {reads}, but the folder has {found}")
