"""What kind of checkpoint lies at a URL, and which loader reads it: from the names of its files
alone, without torch."""

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
    "core": ("megatron",),
    "legacy": ("megatron",),
    "torch_dist": ("torch_dist",),
}
"""What the loaders of others read; ours says for itself what it found."""

DESCRIBED_IN = {"config.json", "params.json"}
"""Where one of these lies alone, its reader says what else there should be."""

CALLED: dict[Kind, str] = {
    "trainyard": "a checkpoint of trainyard",
    "hf": "a Hugging Face folder",
    "meta": "Meta's files",
    "megatron": "Megatron-LM's torch format",
    "torch_dist": "Megatron-LM's torch_dist format",
}


def loader_for(url: str, asked: str = "auto") -> str:
    """The loader that was asked for, or the one for what lies there.

    Nothing that looks like a checkpoint is left to ours, which says what it found."""
    if asked != "auto":
        return asked
    kind = detect(url)
    found = "trainyard" if kind is None else OF_KIND[kind]
    log.info("--loader auto: reading %s with %s", url, found)
    return found


def refuse_unfit(url: str, loader: str) -> None:
    """Raise ConfigError that says what lies there where a loader does not read it. A folder may
    hold several kinds, and the one that was asked for is read then."""
    wanted = FITS.get(loader)
    if wanted is None:
        return
    names = store.list_files(url)
    kinds = kinds_of_names(names)
    if set(kinds) & set(wanted) or (not kinds and DESCRIBED_IN & names.keys()):
        return
    reads = f"--loader {loader} reads {' or '.join(CALLED[kind] for kind in wanted)}"
    if kinds:
        raise ConfigError(
            f"{url}: {reads}, and what lies there is {CALLED[kinds[0]]}; give --loader "
            f"{OF_KIND[kinds[0]]}, or auto"
        )
    found = ", ".join(shown(name) for name in list(names)[:5]) if names else "nothing is there"
    raise ConfigError(f"{url}: {reads}, and there is none: {found}")
